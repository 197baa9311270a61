"""A model of torch's own modules that are to be swapped, and ids for them."""

from typing import Any

import numpy as np
import torch
from module_tables import DIMS, ROWS

Tables = dict[str, np.ndarray]
TOLERANCE = 40 * 200 * 2.0**-24  # as in test_embeddings.py
IDS = torch.tensor([3, 499, 0, 3, 7, 7, 2])
OFFSETS = torch.tensor([0, 2, 2, 5])


class Plain(torch.nn.Module):
    """torch's own modules; `user_sum` is found by its name, `page` by its mapping."""

    def __init__(self, tables: Tables, mode: str = "sum", **options: Any) -> None:
        super().__init__()
        self.user_sum = torch.nn.EmbeddingBag(ROWS, DIMS["user"], mode=mode, **options)
        self.inner = torch.nn.Module()
        self.inner.page = torch.nn.EmbeddingBag(ROWS, DIMS["page"], mode="sum", include_last_offset=True)
        self.user_ids = torch.nn.Embedding(ROWS, DIMS["user"])
        self.top = torch.nn.Linear(4, 2)
        for module, table in ((self.user_sum, "user"), (self.inner.page, "page"), (self.user_ids, "user")):
            module.weight.data.copy_(torch.from_numpy(tables[table]))

    def forward(self) -> list[torch.Tensor]:
        weights = torch.linspace(0, 1, 7)
        return [
            self.user_sum(IDS, OFFSETS),
            self.user_sum(IDS, OFFSETS, per_sample_weights=weights),
            self.user_sum(input=IDS[:6].view(2, 3), per_sample_weights=weights[:6].view(2, 3)),
            self.inner.page(IDS, torch.cat([OFFSETS, torch.tensor([7])])),
            self.user_ids(IDS[:6].view(2, 1, 3)),
        ]


MAPPING = {"inner.page": "page_sum"}
