"""Ranks of a real TorchRec training on the CPU, in processes of their own.

A model with an EmbeddingBagCollection and an EmbeddingCollection, sharded in every way that is named here,
behind DistributedModelParallel; the dense part is behind torch's DistributedDataParallel, or FSDP2. Two ranks
of one host, or two of each of two hosts, which TorchRec tells apart by LOCAL_WORLD_SIZE alone.
"""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrec.streamable import Pipelineable

RANKS, BATCH, IDS = 2, 8, 3
ROWS = {"tw": 60, "rw": 90, "cw": 70, "dp": 50}
SEQUENCE_ROWS = {"stw": 40, "srw": 80}
DIM, GRID_DIM = 16, 256  # a grid has shards of 128 columns


def run_ranks(body: Callable[..., Any], *arguments: Any, hosts: int = 1) -> list[Any]:
    """body(rank, *arguments) in two processes a host with a gloo group; what they returned. AssertionError:
    one failed."""
    ranks = RANKS * hosts
    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        started = [
            context.Process(target=_rank, args=(rank, ranks, port, folder, body, arguments))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(300)
        late = [process for process in started if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        errors = "".join(p.read_text() for p in sorted(Path(folder).glob("*.error")))
        assert not errors and not late and not any(p.exitcode for p in started), (
            errors,
            [p.exitcode for p in started],
        )
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, port: int, folder: str, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        torch.save(body(rank, *arguments), f"{folder}/{rank}")
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        torch.distributed.destroy_process_group()


class Model(torch.nn.Module):
    """Pooled and sequence embeddings, and a dense part of three layers. cw_dim: of the table `cw`."""

    def __init__(self, cw_dim: int) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

        meta = torch.device("meta")
        dims = dict.fromkeys(ROWS, DIM) | {"cw": cw_dim}
        bags = [
            EmbeddingBagConfig(name=n, embedding_dim=dims[n], num_embeddings=r, feature_names=[f"f_{n}"])
            for n, r in ROWS.items()
        ]
        sequences = [
            EmbeddingConfig(name=n, embedding_dim=DIM, num_embeddings=r, feature_names=[f"f_{n}"])
            for n, r in SEQUENCE_ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=meta)
        self.sequences = EmbeddingCollection(tables=sequences, device=meta)
        width = sum(dims.values()) + DIM * len(SEQUENCE_ROWS)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(3)])

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        looked_up = self.sequences(batch.sequences)
        pooled = [looked_up[f"f_{n}"].values().view(BATCH, IDS, DIM).sum(1) for n in SEQUENCE_ROWS]
        hidden = self.layers(torch.cat([self.bags(batch.bags).values(), *pooled], 1))
        loss = hidden.square().mean()
        return loss, hidden.detach()


def batches(rank: int, steps: int) -> list[Any]:
    """The same for every run with this rank."""
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(rank)

    def features(rows: dict[str, int]) -> Any:
        ids = torch.cat([torch.randint(0, r, (BATCH * IDS,), generator=generator) for r in rows.values()])
        return KeyedJaggedTensor([f"f_{n}" for n in rows], ids, lengths=torch.full((BATCH * len(rows),), IDS))

    return [Batched(features(ROWS), features(SEQUENCE_ROWS)) for _ in range(steps)]


class Batched(Pipelineable):
    """Two KeyedJaggedTensors that pipelines can move."""

    def __init__(self, bags: Any, sequences: Any) -> None:
        self.bags, self.sequences = bags, sequences

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batched":
        return Batched(self.bags.to(device, non_blocking), self.sequences.to(device, non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.bags.record_stream(stream)
        self.sequences.record_stream(stream)

    def pin_memory(self) -> "Batched":
        return Batched(self.bags.pin_memory(), self.sequences.pin_memory())


def sharded(dense: str = "ddp", device: str = "cpu", weight_init_device: str | None = None) -> Any:
    """The model behind DistributedModelParallel. dense: ddp or fsdp. weight_init_device: of the sharders.
    Weights are the same in every run. On two hosts the first three bags are sharded by host."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        grid_shard,
        row_wise,
        table_row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from tableside.loader.tbe.sharders import with_weight_init_device

    torch.manual_seed(0)
    ranks = torch.distributed.get_world_size()
    model = Model(GRID_DIM if ranks > RANKS else DIM)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    sharders = [
        with_weight_init_device(EmbeddingBagCollectionSharder(fused_params=fused), weight_init_device),
        with_weight_init_device(EmbeddingCollectionSharder(fused_params=fused), weight_init_device),
    ]
    planned = partial(construct_module_sharding_plan, local_size=RANKS, world_size=ranks, device_type=device)
    kernel = {"compute_kernel": "fused"}
    bags = {
        "tw": table_wise(0, **kernel),
        "rw": row_wise(**kernel),
        "cw": column_wise([0, 1], **kernel),
        "dp": data_parallel(),
    }
    if ranks > RANKS:
        bags |= {"tw": table_row_wise(0), "rw": table_row_wise(1), "cw": grid_shard([0, 1])}
    sequences = {"stw": table_wise(1, **kernel), "srw": row_wise(**kernel)}
    plan = {
        "bags": planned(model.bags, bags, sharders[0]),
        "sequences": planned(model.sequences, sequences, sharders[1]),
    }
    if dense == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, mesh=torch.distributed.init_device_mesh(device, (ranks,)))
    world = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    wrapped = DistributedModelParallel(
        model,
        env=world,
        plan=ShardingPlan(plan),
        sharders=sharders,
        device=torch.device(device),
        init_data_parallel=dense == "ddp",
    )
    if weight_init_device != "meta":
        fill(wrapped)
    return wrapped


def tables_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Each FBGEMM module's weights by table, in order."""
    from tableside.quant.stash.find import modules_of

    return [
        w
        for m in modules_of([module])
        if hasattr(m, "split_embedding_weights")
        for w in m.split_embedding_weights()
    ]


def fill(module: torch.nn.Module) -> None:
    for n, weights in enumerate(tables_of(module)):
        weights.copy_(
            torch.empty(weights.shape).uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(n))
        )
