"""All models of the zoo, from the tables; the packages themselves are imported where a model of them is built."""

import importlib

from tests.zoo.model import ZooModel

TABLES = (
    *("transformers_text", "transformers_images", "timm_models", "torchvision_models", "diffusers_models"),
    *("graph_networks", "lucidrains", "medical_and_segmentation", "recommenders"),
)


def models() -> dict[str, ZooModel]:
    """Return every model by name; a name is given once."""
    found: dict[str, ZooModel] = {}
    for name in TABLES:
        table = importlib.import_module(f"tests.zoo.{name}").TABLE
        if twice := found.keys() & table.keys():
            raise ValueError(f"the zoo has two models of these names: {sorted(twice)}")
        found |= table
    return found
