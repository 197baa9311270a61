"""`swap_embeddings` in a model that DistributedModelParallel has sharded over two real ranks.

A training of two steps is saved by torch.distributed.checkpoint, published from there, and swapped in: in the
training's own model, and in one whose shards were never given memory.
"""

import gc
import inspect
import io
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tableside.loader.errors import LoaderError
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.tbe.sharders import with_weight_init_device
from tableside.quant.stash.find import modules_of
from tableside.torch import swap_embeddings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec_ranks
    from torchrec_ranks import ROWS, SEQUENCE_ROWS, batches

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def publish(root: Path, checkpoint: Path) -> None:
    """Publishes the tables of a sharded checkpoint as the model `ads`, in fp32."""
    keys = {name: f"bags.embedding_bags.{name}.weight" for name in ROWS}
    keys |= {name: f"sequences.embeddings.{name}.weight" for name in SEQUENCE_ROWS}
    poolings = {**dict.fromkeys(ROWS, "sum"), **dict.fromkeys(SEQUENCE_ROWS, "none")}
    raw = {
        "name": "ads",
        "checkpoint": str(checkpoint),
        "tables": {name: {"key": key, "row_format": "fp32"} for name, key in keys.items()},
        "features": {f"f_{name}": {"table": name, "pooling": p} for name, p in poolings.items()},
    }
    load(parse_model(raw, Path()), root)


def swapped(rank: int, root: str, checkpoint: str) -> dict[str, Any]:
    """What a rank found: losses and vectors before and after, and what is left of the shards."""
    import torch.distributed.checkpoint as dcp
    from torchrec.distributed.train_pipeline import EvalPipelineSparseDist

    first, *others = batches(rank, 4)
    model = torchrec_ranks.sharded()
    optimizer = torch.optim.SGD(model.module.layers.parameters(), lr=0.1)
    for batch in others[:2]:
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dcp.save(model.state_dict(), checkpoint_id=checkpoint)
    if rank == 0:
        publish(Path(root), Path(checkpoint))
    torch.distributed.barrier()

    def vectors(of: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            bags = of.module.bags(first.bags)
            return [bags.values(), *(jt.values() for jt in of.module.sequences(first.sequences).values())]

    found: dict[str, Any] = {"before": [*vectors(model), model(first)[1]]}
    shards = [weakref.ref(m) for m in modules_of([model]) if hasattr(m, "split_embedding_weights")]
    found["replaced"] = sorted(swap_embeddings(model, "ads", root=root))
    gc.collect()
    found["left"] = (len(shards), sum(shard() is not None for shard in shards))
    with torch.no_grad():
        found["after"] = [*vectors(model), model(first)[1]]
    model.eval()
    pipeline = EvalPipelineSparseDist(model, optimizer, torch.device("cpu"))
    found["pipelined"] = pipeline.progress(iter([first]))

    bare = torchrec_ranks.sharded(weight_init_device="meta")
    weights = [m for m in modules_of([bare]) if hasattr(m, "momentum1_host")]
    found["devices"] = {str(t.device) for m in weights for t in (m.weights_host, m.momentum1_host)}
    with pytest.raises(LoaderError) as error:
        bare(first)
    found["error"] = str(error.value)
    swap_embeddings(bare.module, "ads", root=root)
    dense = {name: value for name, value in bare.state_dict().items() if "layers" in name}
    dcp.load(dense, checkpoint_id=checkpoint)
    with torch.no_grad():
        found["bare"] = [*vectors(bare), bare(first)[1]]
    torch.save(bare.state_dict(), io.BytesIO())
    return found


def test_tables_take_the_place_of_shards(root: Path, tmp_path: Path) -> None:
    """Each rank looks up its own batch in the tables that all share. Rows are fp32; a row-wise bag of three
    values below 0.3 was summed in another order. The shards, which the optimizer held too, are gone."""
    for found in torchrec_ranks.run_ranks(swapped, str(root), str(tmp_path / "saved")):
        assert found["replaced"] == ["bags", "sequences"]
        assert found["left"][0] >= 5 and found["left"][1] == 0
        for after in (found["after"], found["bare"]):
            for one, other in zip(found["before"], after, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        assert torch.equal(found["pipelined"], found["after"][-1])
        assert found["devices"] == {"meta"}
        assert "has its weights on meta, so they have no values; replace it" in found["error"]


@pytest.mark.parametrize(("device", "error"), [(None, None), ("disk", "weight_init_device is 'disk'")])
def test_a_sharder_keeps_what_it_was(device: str | None, error: str | None) -> None:
    """Its own copy, of its own class; a device that no weights can begin on is refused."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
    if error is not None:
        with pytest.raises(LoaderError, match=error):
            with_weight_init_device(sharder, device)
        return
    found = with_weight_init_device(sharder, device)
    assert type(found) is type(sharder) and found is not sharder
    assert found.fused_params == sharder.fused_params and found.module_type is sharder.module_type
    # TorchRec's sharders around others name what they give
    names = [
        list(inspect.signature(of.shard).parameters) for of in (sharder, with_weight_init_device(sharder))
    ]
    assert names[0] == names[1]
