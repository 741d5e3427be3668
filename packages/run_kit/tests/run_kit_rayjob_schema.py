"""The part of KubeRay's schema of a RayJob that `plinth rayjob` uses: `run_kit_rayjob_schema.json`.

    python packages/run_kit/tests/run_kit_rayjob_schema.py ray.io_rayjobs.yaml VERSION

writes that file from the custom resource definition of a version of KubeRay
(helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml), which is 1.4 MB.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).with_suffix(".json")
_KEPT = ("type", "required", "enum", "minimum", "maximum", "pattern", "format", "anyOf", "allOf", "description")


def full_schema(crd: Path) -> Any:
    """The OpenAPI schema of version v1 in a custom resource definition."""
    versions = yaml.safe_load(crd.read_text())["spec"]["versions"]
    return next(each for each in versions if each["name"] == "v1")["schema"]["openAPIV3Schema"]


def strict(schema: Any) -> Any:
    """The schema as the API server checks it with `--validate=strict`: no unknown fields."""
    if isinstance(schema, dict):
        closed = {"additionalProperties": False} if "properties" in schema else {}
        return {**closed, **{key: strict(value) for key, value in schema.items()}}
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def reduced(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """What of a schema `value` uses; every field that is required stays."""
    found = {key: schema[key] for key in _KEPT if key in schema and key != "description"}
    if isinstance(value, list):
        parts = [reduced(schema["items"], each) for each in value]
        found["items"] = merged(parts)
    elif isinstance(value, dict) and "properties" in schema:
        fields = {key: reduced(schema["properties"][key], each) for key, each in value.items()}
        required = {key: schema["properties"][key] for key in schema.get("required", ()) if key not in fields}
        found["properties"] = required | fields
    elif isinstance(value, dict) and "additionalProperties" in schema:
        found["additionalProperties"] = schema["additionalProperties"]
    return found


def merged(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """One schema with the fields of all."""
    whole: dict[str, Any] = {}
    for schema in schemas:
        for key, value in schema.items():
            whole[key] = merged([whole[key], value]) if key in whole and isinstance(value, dict) else value
    return whole


def main(crd: str, version: str) -> None:
    from run_kit_rayjob_examples import EXAMPLES

    schema = full_schema(Path(crd))
    parts = [reduced(schema, example) for example in EXAMPLES]
    whole = {"$comment": f"a part of ray.io/v1 RayJob of KubeRay {version} (Apache-2.0)", **merged(parts)}
    SCHEMA.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
