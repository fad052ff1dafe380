"""Help and errors for misspelt keys come from source files, and agree with the classes."""

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest

from lrl.cli.error_messages import nearest
from lrl.cli.help import help_text
from lrl.cli.keys import check_keys
from lrl.cli.signatures import Argument, arguments, find_class
from lrl.registry import components

LAKE = ("--config", "configs/frozen_lake/grpo.yaml")
POLICY = "--model.init_args.policy.init_args"

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("lam", "gae_lambda"), ("eps_clip", "clip_range"), ("kl_ceof", "kl_coef"), ("learning_rate", "lr"), ("xyz", None)],
)
def test_a_name_of_another_library_or_a_typing_error_is_recognised(name, meant):
    assert nearest(name, ["lr", "gae_lambda", "clip_range", "kl_coef", "schedule"]) == meant


def test_a_synonym_that_is_no_setting_there_is_not_suggested():
    assert nearest("learning_rate", ["num_envs", "group_size"]) is None


def check(*words):
    check_keys(["fit", *LAKE, *words])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--model.init_args.lr", "1"],
            "model.init_args.lr is not an argument of GRPOModule; did you mean 'optimizer.lr'?",
        ),
        (
            ["--model.init_args.optimizer.lrr=1"],
            "model.init_args.optimizer.lrr is not .* OptimizerConfig; did you mean 'lr'?",
        ),
        (["--model.lrr", "1"], "model.lrr is not an argument of GRPOModule; did you mean 'optimizer.lr'?"),
        (
            ["--model.init_args.no_such_key", "1"],
            "model.init_args.no_such_key is not an argument of GRPOModule; it must be one",
        ),
        (
            ["--model", "TRPOModule", "--model.init_args.lr", "1"],
            "not an argument of TRPOModule; did you mean 'value_fit.lr'?",
        ),
        (
            ["--model.init_args.policy", "MLPPolicy", "--model.policy.hidden_size", "[4]"],
            "model.policy.hidden_size is not an argument of MLPPolicy; did you mean 'hidden_sizes'?",
        ),
        (["--data.init_args.n_envs", "1"], "n_envs is not an argument of RolloutDataModule; did you mean 'num_envs'?"),
        (["--data.init_args.validation.epsodes", "1"], "not an argument of ValidationConfig; did you mean 'episodes'?"),
        ([f"{POLICY}.sampling.temprature", "1"], "not an argument of SamplingConfig; did you mean 'temperature'?"),
        (
            [f"{POLICY}.language_model.lora.lora_alpha", "1"],
            "lora.lora_alpha is not .* LoRAConfig; did you mean 'alpha'?",
        ),
        ([f"{POLICY}.max_tokens", "1"], "not an argument of TextPolicy; did you mean 'sampling.max_new_tokens'?"),
        (["--trainer.max_epoch", "1"], "trainer.max_epoch is not an argument of Trainer; did you mean 'max_epochs'?"),
        (
            ["--trainer.callbacks+", "Transcripts", "--trainer.callbacks.evry", "1"],
            "evry is not an argument of Transcripts",
        ),
        (
            ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=x"],
            "EarlyStopping; did you mean 'monitor'?",
        ),
        (
            ["--trainer.callbacks", "[{class_path: ExactSuccess, init_args: {map: 1}}]"],
            "map is not an argument of Exact",
        ),
        (
            ["--data.init_args.env.init_args.rewards", '[{"class_path": "FormatReward", "init_args": {"wieght": 1}}]'],
            "wieght",
        ),
        (["--max_epochs", "1"], "max_epochs is not a key of a run; did you mean 'trainer.max_epochs'?"),
        (["--tariner.max_epochs", "1"], "tariner is not a key of a run; did you mean 'trainer'?"),
        (["--nonsense", "1"], "nonsense is not a key of a run; it must be one of ckpt_path, config, "),
        (["--optimizer", "Adam"], "optimizer is not a key of a run"),
        (["--lr_scheduler", "x"], "lr_scheduler is not a key of a run"),
        (["--verbose", "true"], "verbose is not a key of a run"),
        (["--trainer.max_epochs", "--"], "'--' follows --trainer.max_epochs; it must be a key or a value."),
    ],
)
def test_a_misspelt_key_of_the_command_line_is_named_in_a_sentence(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(*words)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.init_args.validation", "ValidationConfig"),
        ("model.init_args.optimizer", "OptimizerConfig"),
        ("model.init_args.policy.init_args.language_model", "LanguageModelConfig"),
    ],
)
def test_settings_that_cannot_be_null_are_named_in_a_sentence(key, name):
    words = ["fit", "--config", "frozen_lake/grpo.yaml", f"--{key}", "null"]
    with pytest.raises(ValueError, match=rf"^{key} is null; it must be a mapping with the keys of {name}, or be left"):
        check_keys(words)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (
            f"{POLICY}.language_model.lora.alpha",
            "null",
            "null; it must be an integer that is at least 1, or be left out.",
        ),
        (f"{POLICY}.language_model.name", "null", "null; it must be a text, or be left out."),
        ("--model.init_args.optimizer.lr", "null", "null; it must be a number that is positive, or be left out."),
        (
            "--data.init_args.env.init_args.invalid_penalty",
            "-.inf",
            "-inf; it must be a number from -3.4e+38 to 3.4e+38.",
        ),
        (
            "--trainer.callbacks",
            "[Transcripts, {init_args: {every: 1}}]",
            "{'init_args': {'every': 1}}; it must be the name of a class, or a mapping with its class_path.",
        ),
        ("--data.init_args.env", "{}", "{}; it must be the name of a class, or a mapping with its class_path."),
        ("--data.init_args.seed", "3", "3; it must be left out, because seed_everything determines it."),
        ("--data.init_args.group_size", "1.0e+300", f"1e+300; it must be an integer less than {2**63}."),
    ],
)
def test_a_value_that_the_parser_would_accept_is_named_in_a_sentence(key, value, sentence):
    with pytest.raises(ValueError) as caught:
        check_keys(["fit", "--config", "frozen_lake/grpo_episodes.yaml", key, value])
    assert re.sub(r"\.\d is ", " is ", str(caught.value)) == f"{key.removeprefix('--')} is {sentence}"


def test_a_model_without_a_class_is_named_in_a_sentence(tmp_path):
    (tmp_path / "model.yaml").write_text("model: {init_args: {}}")
    with pytest.raises(ValueError, match="^model has no class_path; it must be the name of a class, or a mapping"):
        check_keys(["fit", "--config", str(tmp_path / "model.yaml")])


def test_settings_that_may_be_null_are_left_to_the_parser():
    check_keys(["fit", "--config", "frozen_lake/grpo.yaml", "--model.init_args.policy.init_args.value_head", "null"])


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            ["--model.class_path", "TRPOModule"],
            [
                "model is TRPOModule in place of PPOValueHeadModule; it keeps policy, init_from, credit, ent_coef; it "
                "has no optimizer, clip_range, vf_coef, target_kl, so these are left out."
            ],
        ),
        (
            ["--model.policy", "ScoringPolicy"],
            [
                "model.policy is ScoringPolicy in place of TextPolicy; it keeps language_model, prompt, "
                "max_prompt_tokens, pack_tokens, value_head; it has no sampling, so this is left out."
            ],
        ),
        (["--model", "lrl.PPOValueHeadModule", "--trainer.logger", "CSVLogger"], []),
        (["--model.policy", "null", "--model.policy", "MLPPolicy", "--data.env", "GymnasiumEnvs"], []),
        (["--model.policy", "MLPPolicy", "--model.policy.hidden_sizes", "[4]", "--model.policy", "MLPPolicy"], 1),
        (
            [
                "--trainer.callbacks+",
                "ModelCheckpoint",
                "--trainer.callbacks.monitor",
                "a",
                "--trainer.callbacks+",
                "Stop",
            ],
            [],
        ),
        (
            [
                "--model.optimizer",
                '{"class_path": "lrl.OptimizerConfig", "init_args": {"lr": 0.1}}',
                "--model",
                '{"class_path": "REINFORCEPlusPlusModule", "init_args": {"policy": null, "clip_range": 0.1}}',
            ],
            [
                "model is REINFORCEPlusPlusModule in place of PPOValueHeadModule; it keeps init_from, optimizer, "
                "target_kl; it has no credit, ent_coef, vf_coef, so these are left out."
            ],
        ),
    ],
)
def test_the_arguments_that_another_class_keeps_and_lacks_are_named(words, sentences):
    found = check_keys(["fit", "--config", "configs/babyai/ppo_writing.yaml", *words])
    assert found == sentences if isinstance(sentences, list) else len(found) == sentences


def test_a_class_that_does_not_have_a_key_of_a_kept_group_needs_a_configuration():
    sentence = (
        "^model is GRPOModule in place of PPOValueHeadModule, but credit.critic_lambda is set, which GRPOModule does"
    )
    with pytest.raises(ValueError, match=sentence):
        check_keys(["fit", "--config", "babyai/ppo_writing.yaml", "--model.class_path", "GRPOModule"])
    assert len(check_keys(["fit", "--config", "frozen_lake/grpo.yaml", "--model", "PPOValueHeadModule"])) == 1


def test_a_last_option_without_value_is_left_to_the_parser():
    check("--trainer.max_epochs")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "data: {clas_path: RolloutDataModule}",
            "data.clas_path is not a key of an object; did you mean 'class_path'?",
        ),
        (
            "model: {class_path: SFTModule, initargs: {a: 1}}",
            "model.initargs is not a key of an object; .* 'init_args'?",
        ),
        ("seed: 3", "seed is not a key of a run; did you mean 'seed_everything'?"),
        ("trainer: {max_epohcs: 3}", "trainer.max_epohcs is not an argument of Trainer; did you mean 'max_epochs'?"),
        ("trainer.max_epohcs: 3", "trainer.max_epohcs is not an argument of Trainer; did you mean 'max_epochs'?"),
        ("model: {class_path: PPOValueHeadModule, init_args: {lam: 1}}", "did you mean 'credit.gae_lambda'?"),
        ("model: {class_path: GRPOModule, clip_range: 1}", "class_path; it must be model.init_args.clip_range"),
        (
            "model: {init_args: {policy: {class_path: TabularPolicy, init_args: {a: 1}}}}",
            "TabularPolicy, which has none",
        ),
        (
            "trainer: {callbacks+: [{class_path: Transcripts, init_args: {every: 1}}]}",
            "every is not an argument of Transcr",
        ),
        (
            "trainer: {logger: {class_path: CSVLogger, init_args: {save_dirr: x}}}",
            "CSVLogger; did you mean 'save_dir'?",
        ),
    ],
)
def test_a_misspelt_key_of_a_file_is_named_in_a_sentence(text, sentence, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        check("--config", str(tmp_path / "mine.yaml"))


OBJECT = "the name of a class, or a mapping with its class_path."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: -7", "trainer is -7; it must be a mapping with the keys of Trainer."),
        ("model: [1]", f"model is [1]; it must be {OBJECT}"),
        ("model: {class_path: {a: 1}}", "model.class_path is {'a': 1}; it must be the name of a class."),
        ("data: {init_args: {env: true}}", f"data.init_args.env is true; it must be {OBJECT}"),
        (
            "data: {init_args: {validation: 0.5}}",
            "data.init_args.validation is 0.5; it must be a mapping with the keys of ValidationConfig.",
        ),
        (
            "model: {init_args: {optimizer: fast}}",
            "model.init_args.optimizer is 'fast'; it must be a mapping with the keys of OptimizerConfig.",
        ),
        ("model: {CLASS_PATH: a}", "model.CLASS_PATH is not a key of an object; did you mean 'class_path'?"),
        (
            "model: {init_args: {policy: {init_args: {language_model: {name: null}}}}}",
            "language_model.name is null; it must be a text, or be left out.",
        ),
        ("trainer: {max_epochs: .nan}", "trainer.max_epochs is nan; it must be a number."),
        (f"data: {{init_args: {{group_size: {10**30}}}}}", f"group_size is {10**30}; it must be less than {2**63}."),
        ("? ''\n: 1", "'' is not a key of a run; it must be one of"),
        ("model: &a {policy: *a}", "config has keys that are nested too deeply, or a mapping that contains itself."),
    ],
)
def test_a_value_that_cannot_be_checked_by_its_class_is_named_in_a_sentence(text, sentence, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check("--config", str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "contains no mapping; it must contain keys such as model, data and trainer."),
        (b"- model\n- data\n", "contains no mapping; it must contain keys such as model, data and trainer."),
        ("a: für".encode("latin-1"), "is not a text file in UTF-8; it must be a YAML file."),
        (b"trainer: {max_epochs: 3\nmodel: 1", "is not valid YAML: expected ',' or '}', but got ':' in line 2."),
        (b"a: *b", "is not valid YAML: found undefined alias 'b' in line 1."),
        (b"a: 2026-13-45", "is not valid YAML: month must be in 1..12."),
        (b"[" * 3000, "is not valid YAML: it is nested too deeply."),
        (b"trainer:\n  max_epochs: 1\n  max_epochs: 2\n", "the key 'max_epochs' is given a second time in line 3."),
    ],
)
def test_a_file_that_is_no_configuration_is_named_in_a_sentence(content, sentence, tmp_path):
    (file := tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=f"^config is {re.escape(repr(str(file)))}, which .*{re.escape(sentence)}$"):
        check("--config", str(file))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing.yaml", "which does not exist; give a YAML file, or the name of a configuration of lrl."),
        ("nothing.yaml", "which does not exist; give a YAML file, or the name of a configuration of lrl."),
        ("frozen_lake/grpoo.yaml", "which does not exist; did you mean 'frozen_lake/grpo.yaml'?"),
        ("[1", "which does not exist; give a YAML file"),
        ("", "which is a folder; it must be a file."),
        ("configs", "which is a folder; it must be a file."),
        ("x" * 300, "which does not exist"),
        ("a\0b", "which does not exist"),
    ],
)
def test_a_name_that_is_no_configuration_is_named_in_a_sentence(name, sentence):
    with pytest.raises(ValueError, match=re.escape(f"config is {name!r}, {sentence}")):
        check("--config", name)


def test_the_file_of_a_misspelt_option_is_not_read():
    with pytest.raises(ValueError, match="confi is not a key of a run; did you mean 'config'"):
        check_keys(["fit", "--confi", "frozen_lake/grpo.yaml", "--model.whatever", "1"])


@pytest.mark.parametrize(
    "words",
    [
        ["--model.optimizer.lr", "1e-3", "--trainer.callbacks", "null", "--model.init_args.clip_range_high=null"],
        ["--data.init_args.validation.env.init_args.kwargs", '{"map_name": "None"}'],
        ["--data.init_args.validation.env.init_args.kwargs.map_name", "8x8"],
        ["--model", "no_such_package.Module", "--model.init_args.whatever", "1"],
        ["--model.init_args.policy", "torch.nn.Linear", f"{POLICY}.in_features", "1"],
        ["--trainer.logger", "WandbLogger", "--trainer.logger.whatever_wandb_takes", "x"],
        ["--trainer.strategy", "ddp", "--trainer.max_time", "{hours: 1}", "--trainer.logger", "true"],
        ["--model.init_args.policy", "[unreadable"],
        ["--print_config", "--seed_everything=1", "-c", "overlays/debug.yaml", "--push_to_hub", "me/lake"],
        ["--model.init_args.policy", "null", f"{POLICY}.whatever", "1"],
        ["--model.init_args.optimizer", "{class_path: some.Config, whatever: 1}"],
        ["--trainer.profiler", "simple", "--trainer.plugins", "[{class_path: some.Plugin, init_args: {a: 1}}]"],
        ["--config", '{"model": {"class_path": "PPOValueHeadModule"}}', "--model.vf_coef", "1"],
        ["--trainer", "unreadable.yaml", "--trainer.callbacks.whatever", "1"],
        ["--data.validation", "some.yaml", "--data.validation.env.whatever", "1"],
    ],
)
def test_correct_and_undecidable_keys_are_left_to_the_parser(words):
    check(*words)


def test_a_configuration_in_a_pipe_is_left_to_the_parser(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # as the shell's <(...); reading it here would block, and empty it for the parser
    check("--config", str(tmp_path / "pipe"), "--model.argument_of_its_class", "1")


def test_keys_of_other_commands_are_not_checked():
    check_keys(["validate", *LAKE, "--verbose", "true"])
    with pytest.raises(ValueError, match="return_predictions is not a key"):
        check_keys(["validate", *LAKE, "--return_predictions", "true"])


@pytest.mark.slow
def test_every_configuration_passes_with_the_overlays():
    overlays = [
        path for path in Path("configs/overlays").glob("*.yaml") if path.stem != "qlora"
    ]  # language models only
    for path in Path("configs").glob("[!o]*/*.yaml"):
        check_keys(["fit", *(word for file in (path, *overlays) for word in ("--config", str(file)))])


@pytest.mark.slow
def test_arguments_of_every_component_are_read_from_source_files():
    for name, path in components().items():
        found, kind = find_class(path), getattr(importlib.import_module(path.rpartition(".")[0]), name)
        named = inspect.signature(kind).parameters.values()  # a protocol's constructor has *args and **kwargs
        assert {one.name for one in arguments(found)} == {one.name for one in named if one.kind not in VARIADIC}, name


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    def __init__(self, a, *, b=1): pass", ["a", "b"]),
        ("class A:\n    def __init__(self, a, **more): pass", None),
        ("class A(B): pass\nclass B:\n    def __init__(self, b): pass", ["b"]),
        ("class A(Unknown): pass", None),
        ("class A(B, C): pass\nclass B:\n    def __init__(self, b): pass\nclass C: pass", ["b"]),
        (
            "class A(B, C): pass\nclass B(D): pass\nclass C(D):\n    def __init__(self, c): pass\n"
            "class D:\n    def __init__(self, d): pass",
            None,
        ),
        ("from abc import ABC\nclass A(ABC): pass", []),
        ("import attrs\n@attrs.define\nclass A:\n    a: int", None),
        (
            "@dataclass\nclass B:\n    b: int\n@dataclass\nclass A(B):\n    a: int = 1\n    K: ClassVar[int] = 2",
            ["b", "a"],
        ),
        ("@dataclass\nclass A:\n    a: int = field(default=1)\n    b: int = field(init=False)", ["a"]),
        ("class A(metaclass=M):\n    def __init__(self, a): pass", None),
        ("class A:\n    def __init__(self, a): pass\n    def __new__(cls, *args): pass", None),
        ("if True:\n    class A:\n        def __init__(self, a): pass", ["a"]),
        ("class A(:", None),
    ],
)
def test_arguments_are_read_from_source(source, names, tmp_path, monkeypatch):
    module = f"module_{abs(hash(source))}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = find_class(f"{module}.A")
    given = None if found is None else arguments(found)
    assert (given and [one.name for one in given]) == (names and [*names])


def test_base_classes_are_found_through_relative_imports(tmp_path, monkeypatch):
    inner = tmp_path / "package_with_relative_imports" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "outer.py").write_text("class Outer:\n    def __init__(self, outer): pass")
    (inner / "sibling.py").write_text("class Sibling:\n    def __init__(self, sibling): pass")
    (inner / "__init__.py").write_text("from .sibling import Sibling")
    (inner.parent / "__init__.py").touch()
    (inner / "classes.py").write_text(
        "from ..outer import Outer\nfrom .sibling import Sibling\nfrom . import Sibling as Reexported\n"
        "class A(Outer): pass\nclass B(Sibling): pass\nclass C(Reexported): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [arguments(find_class(f"package_with_relative_imports.inner.classes.{name}")) for name in "ABC"]
    assert [[one.name for one in each] for each in found] == [["outer"], ["sibling"], ["sibling"]]


@pytest.mark.parametrize(
    ("annotation", "name", "takes_any_keys"),
    [
        ("B | None", "B", False),
        ("Optional[Union[B, int]]", "B", False),
        ("C", None, False),
        ("B | Mapping[str, B]", None, True),
        ("B | Any", None, True),
        ("list[B]", None, False),
    ],
)
def test_a_group_of_settings_is_the_one_dataclass_of_a_type(annotation, name, takes_any_keys, tmp_path, monkeypatch):
    (tmp_path / "module_of_b.py").write_text("@dataclass\nclass B:\n    pass\nclass C:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = Argument("module_of_b", "x", ast.parse(annotation, mode="eval").body, None, "")
    assert (found.group and found.group.name) == name and found.takes_any_keys == takes_any_keys


def test_help_shows_our_classes_before_the_arguments_of_the_trainer():
    text = help_text(["fit", "--help"], "train")
    parts = [
        "GRPOModule",
        "RolloutDataModule",
        "--seed_everything",
        "--model.help",
        "MinariRows",
        "--trainer.max_epochs",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert all(name in text for name in components())
    assert "--optimizer" not in text and "--lr_scheduler" not in text


def test_help_of_a_class_lists_its_arguments_with_their_groups():
    text = help_text(["fit", "--model.help", "PPOValueHeadModule"], "train")
    assert "--model.init_args.optimizer.lr" in text and "(default: 0.95)" in text
    assert help_text(["fit", "--model.help", "no_such.Module"], "train") is None
    assert "--trainer.callbacks.init_args.monitor" in help_text(
        ["fit", "--trainer.callbacks.help=lightning.pytorch.callbacks.EarlyStopping"], "train"
    )
