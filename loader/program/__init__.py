"""Exported programs (`torch.export.save`, .pt2) as scorers: read as data, and run without trusting them.

    read        a .pt2 file -> `Program`, by the rules of `vet`; without torch
    graph       a program: calls of operators, weights as bytes, inputs
    operators   the operators allowed
    write       a program -> the published archive
    recognize   finds programs of dense layers alone
    layers      runs those by our own kernel (`_layers.c`), without torch
    checks      checks of sizes before a call
    run         runs any other program
    embeddings  embedding calls of a trained model's program, for `tableside init --from-module`
    precision   a program in bf16 or fp16
    measure     propagates shapes: checks them, and counts bytes and work of a call

checks, run, precision and measure import torch; import them where they are used.
"""

from tableside.loader.program.graph import HOW_TO_EXPORT, Program, ProgramInput
from tableside.loader.program.read import LARGEST_BYTES, read_program
from tableside.loader.program.write import write_program

__all__ = ["HOW_TO_EXPORT", "LARGEST_BYTES", "Program", "ProgramInput", "read_program", "write_program"]
