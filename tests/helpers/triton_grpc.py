"""tritonclient[grpc], unchanged, with a pool of its own for its messages: KServe's client has some of the
same names, and a process takes each once."""

from unittest.mock import patch

from google.protobuf import descriptor_pool

_pool = descriptor_pool.DescriptorPool()
with patch.object(descriptor_pool, "Default", lambda: _pool):
    import tritonclient.grpc as triton

__all__ = ["triton"]
