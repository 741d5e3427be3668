# BUILD-file functions (pants.toml, build_file_prelude_globs).
# ruff: noqa: F821


def plinth_package(module):
    """Targets of a package: sources, data files, tests, and the wheel."""
    # The stubs list the lazy exports: inference follows their imports.
    python_sources(name="lib", sources=[f"{module}/**/*.py", f"{module}/**/*.pyi"], dependencies=[":data"])
    resources(name="data", sources=[f"{module}/**/*", f"!{module}/**/*.py*", "!**/__pycache__/**"])
    resources(name="test_data", sources=["tests/**/*.json", "tests/**/*.txt"])
    python_test_utils(name="test_utils", sources=["tests/**/*.py", "!tests/**/test_*.py"], dependencies=[":test_data"])
    # Lazy exports are imported by name at run time, which inference cannot follow: tests depend on the whole package.
    python_tests(
        name="tests",
        sources=["tests/**/test_*.py"],
        dependencies=[":lib", ":test_utils", "//:conftest", "//:tools-config"],
        # One pytest process per package imports torch once instead of once per file.
        batch_compatibility_tag=module,
    )
    resources(name="project", sources=["pyproject.toml", "README.md", "CHANGELOG.md"])
    python_distribution(
        name="dist",
        dependencies=[":lib", ":project"],
        provides=python_artifact(name="plinth-" + module.replace("_", "-")),
        # pyproject.toml holds the version and the dependencies.
        generate_setup=False,
        sdist=False,
    )


def plinth_app():
    """Targets of an app: sources, presets, tests, and the binary `main` for `pants run`."""
    python_sources(name="lib", sources=["**/*.py", "!tests/**"], dependencies=[":presets"])
    resources(name="presets", sources=["presets/**/*.yaml"], dependencies=["//apps:presets"])
    python_tests(
        name="tests",
        sources=["tests/**/test_*.py"],
        dependencies=[":lib", "//:conftest", "//:tools-config"],
    )
    pex_binary(
        name="main",
        entry_point="main.py",
        # Ray workers and vLLM servers are new Python processes, which need a venv of plain files.
        execution_mode="venv",
        layout="packed",
        # Whole packages: lazy exports and the vLLM plugin are imported by name at run time.
        dependencies=[":lib"] + [f"packages/{package}:lib" for package in PACKAGES],
    )


PACKAGES = (
    "plinth_base",
    "rl_core",
    "ds_engine",
    "rollout_vllm",
    "weight_sync",
    "ckpt",
    "rl_data",
    "run_kit",
    "rl_runtime",
)
