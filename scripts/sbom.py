"""Writes a software bill of materials (CycloneDX 1.6, JSON) of each stack: the packages and the pins of the list.

    python scripts/sbom.py [--out DIR]    dist/sbom_cpu.json and dist/sbom_cuda.json

It reads tracked files only, so the same commit gives the same bytes on every machine: names, versions and hashes from
3rdparty/*.txt, and the packages' own versions and requirements from their pyproject.toml. What third-party
distributions require of each other is not in it.
"""

import argparse
import json
import sys
import tomllib
import uuid
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from scripts.build import name_and_version, projects  # noqa: E402 (a script finds its own folder only)

STACKS = ("cpu", "cuda")


def pinned(line: str) -> dict[str, Any]:
    """The component of a line of a list, `NAME==VERSION --hash=sha256:...`, with the hashes of what pip may install.

    A component has hashes of one file, so those of several files are in an external reference each.
    """
    pin, *options = line.split()
    name, version = pin.split("==")
    purl = f"pkg:pypi/{name}@{version}"
    digests = [{"alg": "SHA-256", "content": option.removeprefix("--hash=sha256:")} for option in options]
    component: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if len(digests) == 1:
        component["hashes"] = digests
    elif digests:
        files = [{"type": "distribution", "url": purl, "hashes": [digest]} for digest in digests]
        component["externalReferences"] = files
    return component


def packages() -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Components of the packages in this repository, and the names that each requires, in any extra."""
    components, requires = [], {}
    for folder in projects():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        name, version = name_and_version(folder)
        purl = f"pkg:pypi/{name}@{version}"
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": purl,
            }
        )
        groups = [project["dependencies"], *project["optional-dependencies"].values()]
        names = {str(canonicalize_name(Requirement(text).name)) for text in chain(*groups)}
        requires[purl] = sorted(names - {name})
    return components, requires


def bill(stack: str) -> dict[str, Any]:
    """The bill of materials of one stack."""
    own, requires = packages()
    lines = (REPO / "3rdparty" / f"{stack}.txt").read_text(encoding="utf-8").splitlines()
    components = sorted(own + [pinned(line) for line in lines], key=lambda component: str(component["bom-ref"]))
    refs = {component["name"]: component["bom-ref"] for component in components}
    root = next(component for component in own if component["name"] == "plinth")
    edges = {ref: [refs[name] for name in requires.get(ref, ()) if name in refs] for ref in refs.values()}
    dependencies = [{"ref": ref, "dependsOn": sorted(needed)} for ref, needed in edges.items()]
    parts = [component for component in components if component is not root]
    # The serial number follows from the content, and there is no time in it.
    content = json.dumps([root, parts, dependencies], sort_keys=True)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {
            "component": {**root, "type": "application"},
            "properties": [{"name": "plinth:stack", "value": stack}],
        },
        "components": parts,
        "dependencies": dependencies,
    }


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "dist")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for stack in STACKS:
        content = bill(stack)
        path = out / f"sbom_{stack}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {len(content['components'])} components")


if __name__ == "__main__":
    main()
