from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_kit_testkit import Actor, Data, Example, Optim, SettingError, Zero

from plinth_testing import raises
from run_kit.config.loader import load_config, to_yaml
from run_kit.config.schema import all_paths, class_doc, field_doc, nearest_paths
from run_kit.errors import ConfigError


def load(*overrides: str, presets: tuple[Path, ...] = ()) -> Example:
    return load_config(Example, presets=presets, overrides=overrides)


def problems(*overrides: str, presets: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, presets=presets)
    return [str(problem) for problem in caught.value.problems]


def yaml_file(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_dataclass_defaults() -> None:
    assert load() == Example()


@pytest.mark.parametrize(
    ("override", "pick", "expected"),
    [
        ("seed=7", lambda c: c.seed, 7),
        ("seed=1e3", lambda c: c.seed, 1000),
        ("seed=16_384", lambda c: c.seed, 16384),
        ("actor.zero.stage=3", lambda c: c.actor.zero.stage, 3),
        ("actor.zero.offload=off", lambda c: c.actor.zero.offload, "off"),
        ("actor.optim.lr=1e-4", lambda c: c.actor.optim.lr, 1e-4),
        ("actor.optim.lr=3", lambda c: c.actor.optim.lr, 3.0),
        ("actor.optim.lr=.5", lambda c: c.actor.optim.lr, 0.5),
        ("actor.optim.betas=[0.8, 0.9]", lambda c: c.actor.optim.betas, (0.8, 0.9)),
        ("actor.optim.warmup=5", lambda c: c.actor.optim.warmup, 5),
        ("actor.optim.warmup=null", lambda c: c.actor.optim.warmup, None),
        ("actor.optim.warmup=None", lambda c: c.actor.optim.warmup, None),
        ("actor.enabled=false", lambda c: c.actor.enabled, False),
        ("experiment=2024", lambda c: c.experiment, "2024"),
        ("experiment=1.10", lambda c: c.experiment, "1.10"),
        ("experiment=a=b", lambda c: c.experiment, "a=b"),
        ("experiment='quoted'", lambda c: c.experiment, "quoted"),
        ("experiment=", lambda c: c.experiment, ""),
        ("data.system_prompt=Answer: briefly, please #1", lambda c: c.data.system_prompt, "Answer: briefly, please #1"),
        ("data.system_prompt=None", lambda c: c.data.system_prompt, None),
        ("data.system_prompt='None'", lambda c: c.data.system_prompt, "None"),
        ("data.train=a.parquet", lambda c: c.data.train, ("a.parquet",)),
        ("data.train=[a.parquet, b.parquet]", lambda c: c.data.train, ("a.parquet", "b.parquet")),
        ("data.train=[]", lambda c: c.data.train, ()),
        ("data.weights=0.5", lambda c: c.data.weights, [0.5]),
        ("data.extra.any.thing=1", None, None),
        ("data.extra={b: 2}", lambda c: c.data.extra, {"b": 2}),
        ("data.extra.b=2", lambda c: c.data.extra, {"b": 2}),
        ("critic.zero.stage=3", lambda c: c.critic, Actor(zero=Zero(stage=3))),
        ("critic={}", lambda c: c.critic, Actor()),
        ("slow.zero.stage=3", lambda c: c.slow, Actor(optim=Optim(lr=0.5), enabled=False, zero=Zero(stage=3))),
        ("seed=${actor.zero.stage}", lambda c: c.seed, 2),
        ("experiment=run_${seed}", lambda c: c.experiment, "run_1"),
        ("experiment=${seed}", lambda c: c.experiment, "1"),
        ("experiment=\\${seed}", lambda c: c.experiment, "${seed}"),
    ],
)
def test_override_values(override: str, pick: Any, expected: object) -> None:
    if pick is None:
        assert problems(override)
    else:
        value = pick(load(override))
        assert value == expected
        assert type(value) is type(expected)


def test_keys_change_a_copied_section_whatever_their_order() -> None:
    keys = ["critic=${actor}", "critic.optim.lr=0.5", "actor.zero.stage=3"]
    expected = Actor(zero=Zero(stage=3), optim=Optim(lr=0.5))
    assert load(*keys).critic == load(keys[2], *keys[:2]).critic == expected
    assert load("slow=${actor}", "slow.zero.stage=1").slow == Actor(zero=Zero(stage=1)), "not the defaults of slow"
    (problem,) = problems("critic=${nothing}", "critic.zero.stage=1")
    assert problem.startswith("critic: cannot resolve")


def test_environment_interpolation_gives_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLINTH_TEST_SEED", "42")
    assert load("seed=${oc.env:PLINTH_TEST_SEED}").seed == 42


def test_files_then_overrides_later_wins(tmp_path: Path) -> None:
    first = yaml_file(
        tmp_path, "seed: 2\nactor: {zero: {stage: 1}, optim: {lr: 0.1}}\ndata: {train: [a, b]}\n", "1.yaml"
    )
    second = yaml_file(tmp_path, "seed: 3\nactor: {zero: {stage: 3}}\ndata: {train: [c]}\n", "2.yaml")
    config = load("seed=4", "seed=5", presets=(first, second))
    assert config == Example(seed=5, actor=Actor(zero=Zero(stage=3), optim=Optim(lr=0.1)), data=Data(train=("c",)))


def test_a_key_of_another_program_names_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Example, "PEER_KEYS", {"learning_rate": ["elsewhere.lr", "actor.optim.lr"]}, raising=False)
    assert nearest_paths(Example, "learning_rate") == ["actor.optim.lr"]
    with pytest.raises(ConfigError) as caught:
        load("trainer.args.learning_rate=1e-6")
    assert (caught.value.field, caught.value.remedy) == ("trainer.args.learning_rate", "nearest: actor.optim.lr")


def test_unknown_key_names_the_nearest_and_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "actor:\n  zero: {stge: 3}\n")
    (problem,) = problems(presets=(path,))
    assert problem.startswith("actor.zero.stge: unknown key (given 3); nearest: actor.zero.stage")
    assert str(path) in problem


def test_a_key_below_the_wrong_section_finds_its_place() -> None:
    (problem,) = problems("zero.stage=3")
    assert problem.startswith("zero")
    assert "actor.zero" in problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.zero.stage=7", ["actor.zero.stage", "7", "one of 1, 2, 3", "command line"]),
        ("actor.zero.stage=two", ["actor.zero.stage", "'two'", "one of 1, 2, 3"]),
        ("actor.zero.offload=gpu", ["actor.zero.offload", "'gpu'", "one of none, cpu, off"]),
        ("seed=ten", ["seed", "'ten'", "an integer"]),
        ("seed=1.5", ["seed", "1.5", "an integer"]),
        ("seed=true", ["seed", "true", "an integer"]),
        ("seed=null", ["seed", "null", "an integer"]),
        ("actor.enabled=1", ["actor.enabled", "1", "true or false"]),
        ("actor.enabled=yes", ["actor.enabled", "'yes'", "true or false"]),
        ("actor.optim.warmup=x", ["actor.optim.warmup", "'x'", "an integer or null"]),
        ("actor.optim.betas=[0.9]", ["actor.optim.betas", "[0.9]", "a list of 2 values"]),
        ("actor.optim.betas=[0.9, x]", ["actor.optim.betas[1]", "'x'", "a number"]),
        ("actor.zero=3", ["actor.zero", "3", "a section with the keys stage, offload, bucket_bytes"]),
        ("actor.zero=null", ["actor.zero", "null", "a section"]),
        ("seed.x=3", ["seed.x", "unknown key", "seed is a value"]),
        ("seed={x: 1}", ["seed.x", "unknown key", "seed is a value"]),
        ("data.extra.a=x", ["data.extra.a", "'x'", "an integer"]),
        ("actor.zero.bucket_bytes=-1", ["actor.zero.bucket_bytes: got -1; allowed: above 0 (from command line)"]),
        ("actor.zero.bucket_bytes=7", ["actor.zero: the section cannot work"]),
        ("seed=${nothing.here}", ["seed", "${nothing.here}"]),
        ("seed=${seed}", ["seed"]),
        ("seed", ["'seed' is not an override"]),
        ("=3", ["'=3' is not an override"]),
        ("data.train=[a", ["data.train", "not valid YAML"]),
        ("actor.zero.bucket_bytes=5", ["actor.zero.bucket_bytes: got 5; odd sizes are slow; take 6 or 8"]),
        ("data.train=[{a: 1}]", ["data.train[0].a: unknown key; data.train[0] is a value (text), not a section"]),
        ("data=[1]", ["data: got [1]; allowed: a section with the keys train"]),
        ("critic=-", ["critic: got [None]; allowed: a section", "or null"]),
        ("actor.zero=&a {stage: *a}", ["actor.zero: ", "an anchor that contains itself"]),
        ("data.extra=" + "{a: " * 600 + "1" + "}" * 600, ["data.extra: nested more than 50 levels deep"]),
        ("actor.zero=" + "[" * 600, ["actor.zero: "]),
        ("data.weights=!!python/object/apply:os.system [1]", ["data.weights: the tag", "not supported"]),
        ("seed=!!int x", ["seed: 'x' is no int"]),
        ("actor.enabled=!!bool x", ["actor.enabled: 'x' is no bool"]),
        ("seed=" + "1" * 5000, ["seed: got inf; allowed: a finite number"]),
        ("seed=9223372036854775808", ["seed: got 9223372036854775808; allowed: an integer of 64 bits"]),
        ("data.weights=[1, .nan]", ["data.weights[1]: got nan; allowed: a finite number"]),
        ("experiment=a\udc80", ["experiment: got 'a\\udc80'; allowed: text without NUL characters"]),
        ("data.train=[a, 'b\0']", ["data.train: "]),
    ],
)
def test_bad_values_say_path_value_and_what_is_allowed(override: str, words: list[str]) -> None:
    (problem,) = problems(override)
    for word in words:
        assert word in problem


def test_all_problems_come_at_once() -> None:
    reported = problems("actor.zero.stge=3", "actor.zero.stage=7", "seed=ten", "actor.enabled=maybe", "nonsense=1")
    assert len(reported) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2\n", "'seed' is given twice"),
        ("- a\n- b\n", "expected a mapping"),
        ("seed: [1\n", "not valid YAML"),
        ("? [a]\n: 1\n", "not plain text"),
        ("", "cannot read the file"),  # no such file
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    (problem,) = problems(presets=(yaml_file(tmp_path, text) if text else tmp_path / "a.yaml",))
    assert words in problem
    assert "a.yaml" in problem


def test_a_file_starts_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    yaml_file(tmp_path / "shared", "seed: 5\nactor: {zero: {stage: 1}, optim: {lr: 0.5}}\n", "first.yaml")
    yaml_file(tmp_path, "base: shared/first.yaml\nactor: {zero: {stage: 3}}\n", "second.yaml")
    third = yaml_file(tmp_path, "base: second.yaml\nexperiment: third\n", "third.yaml")
    own = Example(experiment="third", seed=5, actor=Actor(zero=Zero(stage=3), optim=Optim(lr=0.5)))
    assert load(presets=(third,)) == own
    assert load(presets=(third, yaml_file(tmp_path, "seed: 6\n"))).seed == 6


@pytest.mark.parametrize(
    ("base", "words"), [("a.yaml", "a.yaml itself"), ("b.yaml", "based on it"), ("[a]", "got"), ("no.yaml", "no.yaml")]
)
def test_invalid_bases(tmp_path: Path, base: str, words: str) -> None:
    yaml_file(tmp_path, "base: a.yaml\n", "b.yaml")
    (problem,) = problems(presets=(yaml_file(tmp_path, f"base: {base}\n"),))
    assert words in problem


@dataclass(frozen=True, kw_only=True)
class Needs:
    path: str
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Outer:
    needs: Needs


def test_a_required_key_is_reported_and_can_be_given() -> None:
    with raises(ConfigError, field="needs.path", value=..., allowed="text"):
        load_config(Outer)
    assert load_config(Outer, overrides=["needs.path=x"]) == Outer(needs=Needs(path="x"))


@dataclass(frozen=True, kw_only=True)
class Layers:
    names: tuple[str, ...] | Literal["all", "none"] = "all"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "all"),
        (["names=none"], "none"),
        (["names=q_proj"], ("q_proj",)),
        (["names=[all]"], ("all",)),
        (["names=[a, b]"], ("a", "b")),
    ],
)
def test_a_word_may_stand_for_a_list(overrides: list[str], expected: object, tmp_path: Path) -> None:
    config = load_config(Layers, overrides=overrides)
    assert config.names == expected
    assert load_config(Layers, presets=[yaml_file(tmp_path, to_yaml(config))]) == config


MARKS = "\\${}'\":#[],&*!|>%@`~- \n\t0123456789.eE"
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0") | st.sampled_from(MARKS), max_size=12
) | st.lists(st.sampled_from([*MARKS, "${", "\\${"]), max_size=8).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
ZEROS = st.builds(
    Zero,
    stage=st.sampled_from([1, 2, 3]),
    offload=st.sampled_from(["none", "cpu", "off"]),
    bucket_bytes=st.integers(8, 2**63 - 1),
)
OPTIMS = st.builds(Optim, lr=FLOATS, betas=st.tuples(FLOATS, FLOATS), warmup=st.none() | INTEGERS)
ACTORS = st.builds(Actor, zero=ZEROS, optim=OPTIMS, enabled=st.booleans())
SPECIAL = st.sampled_from(["null", "None", "~", "true", "no", "1e-4", "1_000", "0x1", ".inf", "???", "${seed}", "\\${"])
DATAS = st.builds(
    Data,
    train=st.lists(TEXT | SPECIAL, max_size=3).map(tuple),
    weights=st.lists(FLOATS, max_size=3),
    system_prompt=st.none() | TEXT | SPECIAL,
    extra=st.dictionaries(st.text("abc.-_ :'\"1", min_size=1, max_size=4), INTEGERS, max_size=3),
)
EXAMPLES = st.builds(
    Example, experiment=TEXT | SPECIAL, seed=INTEGERS, actor=ACTORS, critic=st.none() | ACTORS, slow=ACTORS, data=DATAS
)


@settings(max_examples=30)
@given(EXAMPLES)
@example(Example(experiment="\x85", data=Data(system_prompt="two\x85lines")))
def test_written_yaml_loads_to_an_equal_config(tmp_path_factory: pytest.TempPathFactory, config: Example) -> None:
    path = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8", newline="")
    assert load(presets=(path,)) == config


@given(st.sampled_from(all_paths(Example)), st.data())
def test_one_wrong_letter_finds_the_key(path: str, data: st.DataObject) -> None:
    head, _, word = path.rpartition(".")
    index = data.draw(st.integers(0, len(word) - 1))
    wrong = f"{head}." * bool(head) + word[:index] + word[index + 1 :]
    if wrong and not wrong.endswith(".") and wrong not in all_paths(Example) and len(word) > 3:
        assert path in nearest_paths(Example, wrong, limit=4)


def test_docs_of_fields_and_classes() -> None:
    assert field_doc(Zero, "offload") == "Device of the optimizer states."
    assert field_doc(Zero, "bucket_bytes") == ""
    assert class_doc(Zero) == "Sharding."
    assert class_doc(Optim) == ""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A named part."""

    function: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise SettingError(field="weight", value=self.weight, allowed="0 or more")


@dataclass(frozen=True, kw_only=True)
class WithTerms:
    terms: Mapping[str, Term] = field(default_factory=dict)


def test_a_mapping_of_sections_is_loaded_and_written(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("terms: {b: {function: f, options: {limit: 3, names: [x, 1]}}, a: {function: g, weight: 1e-1}}")
    config = load_config(WithTerms, presets=[file], overrides=["terms.b.weight=2", "terms.b.options.limit=4"])
    assert list(config.terms) == ["b", "a"], "the order of the file"
    assert config.terms["b"] == Term(function="f", weight=2.0, options={"limit": 4, "names": ["x", 1]})
    assert config.terms["a"].weight == 0.1
    file.write_text(to_yaml(config))
    assert load_config(WithTerms, presets=[file]) == config
    assert "terms.NAME.weight" in all_paths(WithTerms)


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ("terms.a.wieght=1", {"field": "terms.a.wieght", "remedy": "nearest: terms.NAME.weight"}),
        ("terms.a.weight=x", {"field": "terms.a.weight", "value": "x", "allowed": "a number"}),
        ("terms.a.weight=-1", {"field": "terms.a.weight", "value": -1.0, "allowed": "0 or more"}),
        ("terms.a=3", {"field": "terms.a", "value": 3}),
        ("terms.c.weight=1", {"field": "terms.c.function", "value": ...}),
        ("terms=3", {"field": "terms", "value": 3, "source": "command line"}),
    ],
)
def test_mistakes_in_a_mapping_of_sections_name_their_key(override: str, fields: dict[str, Any]) -> None:
    with raises(ConfigError, **fields):
        load_config(WithTerms, overrides=["terms.a.function=f", override])
