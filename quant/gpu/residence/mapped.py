"""Tables that the device reads in host memory."""

from tableside.quant.gpu.residence.in_host_memory import InHostMemory


class Mapped(InHostMemory):
    """Rows are read in host memory, or gathered there by the CPU."""

    is_gathered = True
