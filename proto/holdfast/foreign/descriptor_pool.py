"""Descriptor pool of the protocols of others, apart from the process's default one.

Their packages (`inference`, `grpc.health.v1`) are also registered by other libraries, tritonclient for one, and one
pool refuses a second definition of a name. The stubs beside this file register here, so that a program may import
both. What may not live here: anything else.
"""

from typing import Final

from google.protobuf.descriptor_pool import DescriptorPool

_POOL: Final = DescriptorPool()


def Default() -> DescriptorPool:
    """Named as in `google.protobuf.descriptor_pool`, in whose place the stubs import this module."""
    return _POOL
