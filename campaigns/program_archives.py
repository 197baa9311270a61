"""Archives of exported scorers, which the campaign `programs` changes, read and written."""

import io
import json
import zipfile
from functools import cache
from typing import Any

import torch
from torch.export import Dim, export, save

from tableside.loader.program import read_program, write_program

Archive = dict[str, Any]  # name -> bytes, or parsed JSON


class _Norms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch, self.prelu = (
            torch.nn.Linear(12, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.PReLU(64),
        )
        self.layer, self.group, self.rms = (
            torch.nn.LayerNorm(64),
            torch.nn.GroupNorm(4, 64),
            torch.nn.RMSNorm(64),
        )
        self.top = torch.nn.Linear(64, 2)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.batch(self.linear(torch.cat([user, item], 1))))
        gates = self.top(self.rms(self.group(self.layer(torch.nn.functional.gelu(x)))))
        return torch.softmax(gates, 1)[:, 0]


class _Core(torch.nn.Module):
    """What core ATen has for norms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.batch, self.layer = (
            torch.nn.Linear(12, 64),
            torch.nn.BatchNorm1d(64),
            torch.nn.LayerNorm(64),
        )
        self.prelu = torch.nn.PReLU(64)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.prelu(self.layer(self.batch(self.linear(torch.cat([user, item], 1)))))
        return x.sum(1)


class _Pairs(torch.nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.item, self.convolution = torch.nn.Linear(4, 8), torch.nn.Conv1d(2, 3, 3, padding=1)
        self.embedding = torch.nn.Embedding(8, 8)
        self.register_buffer("places", torch.tensor([1, 0, 2, 2]))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        both = torch.stack([user, self.item(item)], 1)
        all_ = torch.cat([both, self.convolution(both), self.embedding(user.argmax(1)).unsqueeze(1)], 1)
        rows, columns = torch.tril_indices(6, 6, -1)
        pairs = torch.bmm(all_, all_.transpose(1, 2))[:, rows, columns]
        best, where = pairs.topk(4, 1)
        taken = torch.gather(pairs, 1, where) + pairs.index_select(1, self.places) + best
        return torch.sigmoid(taken.sum(1))


class _Attention(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.cross = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.register_buffer("mask", torch.tensor([[True, False, True], [True, True, True]]))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        keys = self.keys(user).reshape(user.shape[0], 3, 8)
        queries = torch.nn.functional.pad(item, (2, 2)).unsqueeze(1).expand(-1, 2, -1)
        found = torch.nn.functional.scaled_dot_product_attention(queries, keys, keys, attn_mask=self.mask)
        left, right = torch.split(user * self.cross(user) + user, [3, 5], dim=1)
        return (
            found.mean((1, 2))
            + left.sum(1) * right.repeat(1, 2).amax(1)
            + torch.einsum("bi,bi->b", item, item)
        )


def exported(module: torch.nn.Module, *, is_decomposed: bool = False) -> bytes:
    """A .pt2 file of a module that takes `user` [batch, 8] and `item` [batch, 4]; is_decomposed: in core
    ATen operators."""
    out, batch = io.BytesIO(), Dim("batch")
    inputs = torch.zeros(2, 8), torch.zeros(2, 4)
    program = export(module.eval(), inputs, dynamic_shapes={"user": {0: batch}, "item": {0: batch}})
    save(program.run_decompositions() if is_decomposed else program, out)
    return out.getvalue()


@cache
def bases() -> tuple[bytes, ...]:
    """Archives to change: as torch wrote them, and as we do."""
    torch.manual_seed(0)
    found = [exported(module) for module in (_Norms(), _Pairs(), _Attention())]
    found += [exported(module, is_decomposed=True) for module in (_Core(), _Attention())]
    return (*found, *(write_program(read_program(data)) for data in found))


def parsed(data: bytes) -> Archive:
    """An archive's entries, JSON parsed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {
        name: json.loads(content) if name.endswith(".json") else content for name, content in entries.items()
    }


def packed(entries: Archive) -> bytes:
    """The archive of entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"s/{name}", content if isinstance(content, bytes) else json.dumps(content))
    return out.getvalue()
