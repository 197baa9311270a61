"""The models that a command names: published ones by their names, others by the path of a model.toml or of a checkpoint."""

import argparse
import os
from pathlib import Path

from tableside.loader.errors import LoaderError
from tableside.loader.model import NAME, read_model
from tableside.loader.versions import Model, models
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, given


def root_settings(options: argparse.Namespace) -> RootSettings:
    """The root, and whose models are trusted, as a command was given them."""
    return RootSettings(**given(options, RootSettings))


def published(options: argparse.Namespace) -> Model:
    """The model that a command names. ServingError: the name is a path, with what to name instead."""
    name: str = options.model
    check_no_path(name)
    settings = root_settings(options)
    return Model(settings.root, name, settings.owner)


def chosen(options: argparse.Namespace) -> list[Model]:
    """The model that is named, or all models. VersionError: the one that is named was never published."""
    if not options.model:
        settings = root_settings(options)
        return models(settings.root, settings.owner)
    model = published(options)
    model.check_known()
    return [model]


def is_path(text: str) -> bool:
    """Whether an argument cannot be a model's name and there is a file or a folder of that name, or it is written as a path."""
    return not NAME.fullmatch(text) and (text.endswith(".toml") or "/" in text or ("\0" not in text and os.path.exists(text)))


def check_no_path(text: str) -> None:
    """ServingError: a path stands where the name of a published model is expected."""
    if not is_path(text) or not os.path.exists(text):
        return  # a name, or what `check_name` refuses
    try:
        name = read_model(Path(text)).name
    except LoaderError:
        raise ServingError(f"{text} is a file; expected the name of a published model, which `tableside list` shows") from None
    raise ServingError(f"{text} is a file; expected the name of the model that it describes: {name}")
