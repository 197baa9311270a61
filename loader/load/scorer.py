"""A model's scorer, checked against its features when it is published."""

from importlib.util import find_spec

from tableside.loader.errors import ModelError, ProgramError
from tableside.loader.files import read_regular
from tableside.loader.model.specs import ModelSpec, ScorerSpec
from tableside.loader.program import LARGEST_BYTES, Program, ProgramInput, read_program, write_program
from tableside.loader.segment.header import ScorerInput, StoredScorer


def stored_scorer(spec: ModelSpec, dims: dict[str, int]) -> tuple[StoredScorer | None, bytes]:
    """Returns the stored scorer and its program's archive. dims: table -> dim. ProgramError: the program is
    not plain, or takes other inputs than the features' vectors."""
    if spec.scorer is None:
        return None, b""
    widths = {f.name: dims[f.table] for f in spec.features}
    pooled = {f.name for f in spec.features if f.pooling != "none"}
    program = None if spec.scorer.program is None else _read(spec.scorer)
    taken = () if program is None else program.inputs
    renamed = dict(spec.scorer.inputs)
    if unknown := sorted(set(renamed) - {i.name for i in taken}):
        raise ProgramError(f"[scorer]: the program has no input {unknown[0]!r}; it has: {_listed(taken)}")
    inputs = []
    for name, width in [(i.name, i.width) for i in taken] or [(f, widths[f]) for f in spec.scorer.features]:
        feature = renamed.get(name, name)
        if feature not in widths:
            inputs.append(ScorerInput(name, None, width))
            continue
        if feature not in pooled:
            raise ProgramError(
                f"[scorer]: input {name!r} is the feature {feature!r}, which is not pooled; pool it by sum "
                "or mean"
            )
        if widths[feature] != width:
            raise ProgramError(
                f"[scorer]: input {name!r} takes [batch, {width}], the vectors of feature {feature!r} are "
                f"{widths[feature]} wide"
            )
        inputs.append(ScorerInput(name, feature, width))
    if not any(i.feature for i in inputs):
        raise ProgramError(
            f"[scorer]: no input of the program is a feature; it takes {_listed(taken)}, the features are "
            f"{', '.join(widths)}"
        )
    if len({i.feature for i in inputs if i.feature}) != sum(i.feature is not None for i in inputs):
        raise ProgramError("[scorer]: two inputs are the same feature")
    if spec.scorer.program is None and len({i.width for i in inputs}) != 1:
        raise ProgramError(
            f"[scorer]: {spec.scorer.kind} of vectors that are {inputs[0].width} and {inputs[1].width} wide"
        )
    return StoredScorer(spec.scorer.kind, tuple(inputs)), b"" if program is None else write_program(program)


def _read(scorer: ScorerSpec) -> Program:
    path = scorer.program
    assert path is not None
    data = read_regular(path, LARGEST_BYTES, "[scorer]'s program", ModelError)
    if find_spec("torch") is None:
        raise ModelError(
            f"[scorer]: {path}: an exported program is checked with torch, which is not installed; install "
            "tableside[torch]"
        )
    from tableside.loader.program.measure import check_shapes

    try:
        program = read_program(data)
        check_shapes(program)
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error
    return program


def _listed(inputs: tuple[ProgramInput, ...]) -> str:
    return ", ".join(i.name for i in inputs) or "nothing"
