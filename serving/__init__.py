"""Time: engine, batching, HTTP, workers, metrics, client and command line.

Knows versions and requests; never how a row is packed.
"""

from tableside.quant.installed import version_of

VERSION = version_of("tableside") or "not installed"  # run from its source tree
