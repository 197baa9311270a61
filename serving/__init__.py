"""Time: requests, versions, executors, HTTP, workers, metrics, evaluations, the client and the command line.

This room knows versions and requests. It never knows how a row is packed.
"""

from tableside.quant.installed import version_of

VERSION = version_of("tableside") or "not installed"  # run from its source tree
