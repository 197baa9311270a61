"""The share of one owner of a model whose tables have a tier."""

from tableside.loader.errors import ModelError
from tableside.loader.model.specs import FeatureSpec, ModelSpec
from tableside.loader.model.tiers import TIER, owner_name


def share_of(spec: ModelSpec, number: int) -> ModelSpec:
    """Returns the model of an owner: its share of each table with a tier, without a scorer. ModelError: there
    is no such owner."""
    tables = tuple(t for t in spec.tables if t.owners)
    owners = len(tables[0].owners) if tables else 0
    if not 0 <= number < owners:
        raise ModelError(
            f"owner {number} of model {spec.name!r}: its tables have {owners} owners, counted from 0; "
            f'those of a table are named by tier = "{TIER}HOST:PORT,..." in model.toml'
        )
    features = tuple(FeatureSpec(t.name, t.name) for t in tables)
    name = owner_name(spec.name, number, owners)
    return ModelSpec(name, spec.checkpoint, tables, features, share=(number, owners))


def whole_name(spec: ModelSpec) -> str:
    """Returns the name of the model of which this is a share."""
    return spec.name.removesuffix("" if spec.share is None else owner_name("", *spec.share))
