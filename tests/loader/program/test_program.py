"""Exported programs as data: what is read, what is left out, and everything that is refused before torch
sees it."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scorers import Ctr

from tableside.loader.errors import ProgramError
from tableside.loader.program import Program, ProgramInput, read_program, write_program
from tableside.loader.program.graph import FP32
from tableside.loader.program.run import Runner, weight_tensors
from tableside.loader.program.vet import LARGEST_NAME, program_input

pytestmark = pytest.mark.quick

Change = Callable[[dict[str, Any]], None]


def changed(data: bytes, change: Change) -> bytes:
    """The archive with its entries changed: {name: bytes}, the model parsed as "model"."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {n.partition("/")[2]: archive.read(n) for n in archive.namelist()}
    model = json.loads(entries.pop("models/model.json"))
    entries_and_model: dict[str, Any] = {**entries, "model": model}
    change(entries_and_model)
    model = entries_and_model.pop("model")
    if model is not None:
        entries_and_model["models/model.json"] = json.dumps(model).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in entries_and_model.items():
            archive.writestr(f"s/{name}", content)
    return out.getvalue()


def runner(program: Program) -> Runner:
    return Runner(program, weight_tensors(program.weights, torch.device("cpu")), torch.device("cpu"), 1 << 30)


def test_a_program_is_written_anew_and_gives_the_same_scores(program: bytes) -> None:
    """Also where a batch of one, or of another size than it was exported with, is scored."""
    vetted = read_program(program)
    assert vetted.inputs == (ProgramInput("user", 8), ProgramInput("clicked", 4), ProgramInput("context", 3))
    written = write_program(vetted)
    assert read_program(written) == vetted and write_program(read_program(written)) == written
    again, module = runner(read_program(written)), Ctr(8, 4, 3)
    for batch in (1, 2, 7):
        inputs = [torch.randn(batch, n) for n in (8, 4, 3)]
        assert torch.equal(again(*inputs), module(*inputs))


class Boom:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def test_pickled_sample_inputs_are_left_out(program: bytes, tmp_path: Path) -> None:
    """torch would unpickle them, with everything allowed where its safe way fails."""
    boom = pickle.dumps(Boom(tmp_path / "ran"))
    vetted = read_program(changed(program, lambda e: e.update({"data/sample_inputs/model.pt": boom})))
    assert not (tmp_path / "ran").exists()
    assert boom not in write_program(vetted)


def test_guards_and_metadata_are_left_out(program: bytes, tmp_path: Path) -> None:
    """torch would evaluate guards as Python."""

    def change(e: dict[str, Any]) -> None:
        e["model"]["guards_code"] = [f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"]
        e["model"]["graph_module"]["graph"]["nodes"][0]["metadata"] = {"torch_fn": "evil"}

    vetted = read_program(changed(program, change))
    runner(vetted)(torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 3))
    assert not (tmp_path / "ran").exists()
    assert b"evil" not in write_program(vetted) and b"touch" not in write_program(vetted)


def call(e: dict[str, Any]) -> Any:
    return e["model"]["graph_module"]["module_call_graph"][0]["signature"]


def nested(kind: str, context: Any) -> Change:
    """Inputs, or what is returned, in a container of a kind that is made by code."""

    def change(e: dict[str, Any]) -> None:
        spec = json.loads(call(e)[kind])
        spec[1].update(type="builtins.dict", context=json.dumps(context))
        call(e)[kind] = json.dumps(spec)

    return change


def renamed(*names: str) -> Change:
    return lambda e: call(e).update(forward_arg_names=list(names))


@pytest.mark.parametrize(
    "change",
    [
        renamed("user", "clicked", "context", "x=__import__('pathlib').Path('ran').touch()"),
        nested("in_spec", ["a':__import__('pathlib').Path('ran').touch(),'b"]),
        nested("out_spec", {"__enum__": True, "fqn": "ctypes:cdll", "name": "evil.so"}),
        nested("out_spec", {"__enum__": True, "fqn": "pydantic:RootModel", "name": "__import__('os')"}),
    ],
    ids=["more names", "keywords", "a library", "an attribute"],
)
def test_names_and_nesting_are_said_anew(program: bytes, change: Change) -> None:
    """torch makes Python of them, and imports what a container is said to be."""
    vetted = read_program(changed(program, change))
    assert b"__import__" not in write_program(vetted) and b"__enum__" not in write_program(vetted)
    inputs = [torch.randn(3, n) for n in (8, 4, 3)]
    assert torch.equal(runner(vetted)(*inputs), Ctr(8, 4, 3)(*inputs))


def nodes(e: dict[str, Any]) -> Any:
    return e["model"]["graph_module"]["graph"]["nodes"]


def tensors(e: dict[str, Any]) -> Any:
    return e["model"]["graph_module"]["graph"]["tensor_values"]


def weights(e: dict[str, Any], **change: Any) -> None:
    config = json.loads(e["data/weights/model_weights_config.json"])
    next(iter(config["config"].values())).update(change)
    e["data/weights/model_weights_config.json"] = json.dumps(config).encode()


def widened(e: dict[str, Any]) -> None:
    config = json.loads(e["data/weights/model_weights_config.json"])
    next(iter(config["config"].values()))["tensor_meta"]["storage_offset"] = {"as_int": 1 << 20}
    e["data/weights/model_weights_config.json"] = json.dumps(config).encode()


def expression(text: str) -> Change:
    def change(e: dict[str, Any]) -> None:
        tensors(e)["user"]["sizes"][0]["as_expr"]["expr_str"] = text

    return change


def test_names_of_inputs_are_as_long_as_the_limit_says() -> None:
    """And not longer."""
    declared = {"sizes": [{"as_expr": {}}, {"as_int": 4}], "dtype": FP32}
    assert program_input("n" * LARGEST_NAME, declared).width == 4
    with pytest.raises(ProgramError, match="its inputs have no names of their own"):
        program_input("n" * (LARGEST_NAME + 1), declared)


EVIL = {
    "torch.load": (
        lambda e: nodes(e)[0].update(target="torch.load"),
        "calls 'torch.load'; expected ATen operators alone",
    ),
    "torch.hub": (lambda e: nodes(e)[0].update(target="torch.hub.load"), "expected ATen operators alone"),
    "from_file": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten.from_file.default"),
        "expected ATen operators alone",
    ),
    "custom": (
        lambda e: nodes(e)[0].update(target="torch.ops.fbgemm.cat.default"),
        "expected ATen operators alone",
    ),
    "attribute": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten.cat.__init__.__globals__"),
        "ATen operators alone",
    ),
    "call": (expression("__import__('os').system('true')"), "has the batch .* which is more than arithmetic"),
    "attributes": (expression("s32.__class__"), "more than arithmetic"),
    "string": (expression("Symbol('x; y')"), "more than arithmetic"),
    "power": (expression("9**9**9**9"), "more than arithmetic"),
    "name": (
        lambda e: nodes(e)[0]["outputs"][0]["as_tensor"].update(name="x = 1\nimport os"),
        "has the name",
    ),
    "input's name": (renamed("user", "clicked", "context=print()"), "its inputs have no names of their own"),
    "subgraph": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "x", "arg": {"as_graph": {}}}),
        "holds a graph",
    ),
    "object": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "x", "arg": {"as_custom_obj": {}}}),
        "holds a custom_obj",
    ),
    "objects": (
        lambda e: e["model"]["graph_module"]["graph"].update(custom_obj_values={"x": {"class_fqn": "a.B"}}),
        "its graph holds custom objects",
    ),
    "pickled weight": (lambda e: weights(e, use_pickle=True), "is pickled, or not a tensor"),
    "weight elsewhere": (lambda e: weights(e, path_name="../../x"), "is pickled, or not a tensor"),
    "no model": (lambda e: e.update(model=None), "expected one model, models/model.json; found none"),
    "compiled": (lambda e: e.update({"data/aotinductor/m/a.so": b""}), "holds compiled libraries"),
    "save": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten.save.default"),
        "of those that a dense part is made of",
    ),
    "alias": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten._reshape_alias.default"),
        "that a dense part is made of",
    ),
    "as_strided": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten.as_strided.default"),
        "that a dense part is made of",
    ),
    "sparse": (
        lambda e: nodes(e)[0].update(target="torch.ops.aten._sparse_coo_tensor_unsafe.default"),
        "a dense part is made of",
    ),
    "arithmetic of texts": (
        lambda e: nodes(e)[0].update(
            target="_operator.mul",
            inputs=[{"name": "a", "arg": {"as_string": "a"}}, {"name": "b", "arg": {"as_int": 1 << 31}}],
        ),
        "something else than numbers",
    ),
    "arithmetic of tensors": (
        lambda e: nodes(e)[0].update(target="_operator.mod"),
        "something else than numbers",
    ),
    "a large number": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "n", "arg": {"as_int": 1 << 40}}),
        "expected one of at most 2,147,483,648",
    ),
    "a value of nothing": (
        lambda e: nodes(e)[1]["inputs"][0]["arg"]["as_tensor"].update(name="other"),
        "uses 'other', which nothing made before",
    ),
    "a value twice": (lambda e: nodes(e).append(nodes(e)[0]), "twice"),
    "a wide input": (
        lambda e: tensors(e)["user"]["sizes"].__setitem__(1, {"as_int": 1 << 30}),
        "expected 1 to 1,048,576",
    ),
    "pinned": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "pin_memory", "arg": {"as_bool": True}}),
        "asks for pinned memory",
    ),
    "sparse layout": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "layout", "arg": {"as_layout": 1}}),
        "is not dense",
    ),
    "unknown argument": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "x", "arg": {"as_complex": {}}}),
        "holds a complex",
    ),
    "device": (
        lambda e: nodes(e)[0]["inputs"].append({"name": "device", "arg": {"as_device": {"type": "meta"}}}),
        "names the device",
    ),
    "weight outside": (lambda e: widened(e), r"of sizes \[.*\] does not lie in its .* bytes"),
    "bounds": (
        lambda e: [b.update(min_val="x") for b in e["model"]["range_constraints"].values()],
        "bounds that are no numbers",
    ),
    "truncated": (
        lambda e: e["model"].pop("graph_module"),
        "not an exported program that this release understands",
    ),
    "two outputs": (
        lambda e: e["model"]["graph_module"]["signature"]["output_specs"].append({"user_output": {}}),
        "returns 2 values",
    ),
}


@pytest.mark.parametrize("name", EVIL)
def test_what_is_more_than_operators_sizes_and_weights_is_refused(program: bytes, name: str) -> None:
    change, message = EVIL[name]
    with pytest.raises(ProgramError, match=message) as caught:
        read_program(changed(program, change))
    assert "torch.export.save(torch.export.export(" in str(caught.value)  # it says how to do it right


def scripted() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("s/code/x.py", "")
        archive.writestr("s/data.pkl", "")
    return out.getvalue()


def saved() -> bytes:
    out = io.BytesIO()
    torch.save(torch.nn.Linear(2, 2), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a zip archive"),
        (pickle.dumps(1), "not a zip archive"),
        (scripted(), "TorchScript, which runs code"),
        (saved(), r"pickled \(torch.save\), which runs code"),
    ],
    ids=["empty", "pickle", "TorchScript", "torch.save"],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        read_program(data)


class Honest(torch.nn.Module):
    """Much of what dense parts are made of: attention, norms, products of pairs, constants, sizes that are
    computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.batch = torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.arange(8.0))
        self.top = torch.nn.Sequential(
            torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(4, 1)
        )

    def forward(self, *, user: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        both = torch.cat([user, item], 0).view(2, user.shape[0], 8).transpose(0, 1)
        mixed = self.norm(
            self.attention(both, both, both, need_weights=False)[0]
        ) + self.shift * torch.tensor(0.1)
        rows, columns = torch.triu_indices(2, 2, 1)
        pairs = torch.bmm(mixed, mixed.transpose(1, 2))[:, rows, columns]
        gate = torch.where(self.batch(user).sum(1, keepdim=True) > 0, pairs, pairs.clamp(-1, 1))
        return {"score": torch.softmax(torch.cat([self.top(gate), -gate], 1), 1)[:, 0]}


def test_honest_programs_are_taken() -> None:
    """Exported by keyword, returning a dictionary of one: called by position, returning the tensor."""
    batch, module = torch.export.Dim("batch"), Honest().eval()
    inputs = {"user": torch.zeros(2, 8), "item": torch.zeros(2, 8)}
    out = io.BytesIO()
    torch.export.save(
        torch.export.export(module, (), inputs, dynamic_shapes={n: {0: batch} for n in inputs}), out
    )
    vetted = read_program(out.getvalue())
    assert [i.name for i in vetted.inputs] == ["user", "item"]
    again = runner(vetted)
    for size in (1, 2, 9):
        user, item = torch.randn(size, 8), torch.randn(size, 8)
        torch.testing.assert_close(again(user, item), module(user=user, item=item)["score"])


def test_programs_that_were_exported_to_train_are_refused() -> None:
    batch, inputs = torch.export.Dim("batch"), {"user": torch.zeros(2, 8), "item": torch.zeros(2, 8)}
    out = io.BytesIO()
    torch.export.save(
        torch.export.export(Honest(), (), inputs, dynamic_shapes={n: {0: batch} for n in inputs}), out
    )
    with pytest.raises(ProgramError, match=r"module.eval\(\)|a dense part is made of"):
        read_program(out.getvalue())
