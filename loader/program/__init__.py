"""Exported programs (`torch.export.save`, .pt2): what a scorer may be, read as data, and run without trusting
it.

    read        a .pt2 file -> `Program`, by the rules of `vet`; without torch, running nothing
    graph       what a program is: calls of operators, weights as raw bytes, inputs
    operators   what it may call
    write       a program -> the archive that is published
    recognize   whether a program is dense layers alone
    layers      runs those, by a kernel of our own (`_layers.c`); without torch
    checks      sizes that kernels trust, checked before a call
    run         the calls of any other program, one after another
    embeddings  the embedding calls of a trained model's program, for `tableside init --from-module`
    precision   a program in bf16 or fp16
    measure     shapes propagated against the weights: where they do not fit, the bytes and the work of a call

checks, run, precision and measure import torch; import them where they are used.
"""

from tableside.loader.program.graph import HOW_TO_EXPORT, Program, ProgramInput
from tableside.loader.program.read import LARGEST_BYTES, read_program
from tableside.loader.program.write import write_program

__all__ = ["HOW_TO_EXPORT", "LARGEST_BYTES", "Program", "ProgramInput", "read_program", "write_program"]
