# BUILD-file functions (pants.toml, build_file_prelude_globs).
# ruff: noqa: F821


def plinth_package(module):
    """The targets every package of packages/ has: code, data files, tests, and the wheel of its own version."""
    python_sources(name="lib", sources=[f"{module}/**/*.py"], dependencies=[":data"])
    resources(name="data", sources=[f"{module}/**/*", f"!{module}/**/*.py", "!**/__pycache__/**"])
    python_test_utils(name="test_utils", sources=["tests/**/*.py", "!tests/**/test_*.py"])
    # Lazy exports are imported by name at run time, where inference cannot follow: tests get the whole package.
    python_tests(
        name="tests",
        sources=["tests/**/test_*.py"],
        dependencies=[":lib", ":test_utils", "//:conftest", "//:tools-config"],
        # One pytest for the package: torch is imported once, not once a file.
        batch_compatibility_tag=module,
    )
    resources(name="project", sources=["pyproject.toml", "README.md", "CHANGELOG.md"])
    python_distribution(
        name="dist",
        dependencies=[":lib", ":project"],
        provides=python_artifact(name="plinth-" + module.replace("_", "-")),
        # The hand-written pyproject.toml holds the version and the dependencies.
        generate_setup=False,
        sdist=False,
    )


def plinth_app():
    """The targets every app of apps/ has: code, presets, tests, and a binary `main` that `pants run` starts."""
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
        # Ray's workers and vLLM's servers start Python anew: only a venv with plain files serves them.
        execution_mode="venv",
        layout="packed",
        # Packages whole: their lazy exports, and vLLM's plugin, are imported by name at run time.
        dependencies=[":lib"] + [f"packages/{package}:lib" for package in PACKAGES],
    )


PACKAGES = ("rl_core", "ds_engine", "rollout_vllm", "weight_sync", "ckpt", "rl_data", "run_kit", "rl_runtime")
