"""Mutated configurations and command lines, which depend only on a seed and a number."""

from __future__ import annotations

import copy
import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
VALUES: dict[str, Sequence[Any]] = {
    "null": [None],
    "boolean": [True, False],
    "zero": [0],
    "one": [1],
    "negative": [-1, -0.5, -7],
    "not a number": [float("nan")],
    "infinite": [float("inf"), float("-inf")],
    "huge": [10**30, 1e300],
    "fraction": [0.37, 2.5],
    "text": ["abc", "0x1f", "1e", "3 4"],
    "empty text": [""],
    "long text": ["x" * 5000],
    "unicode": ["Größe", "学習", "a\u202eb", "🎲"],
    "list": [[], [1, "a", None], [[[]]]],
    "mapping": [{}, {"a": 1}, {"class_path": "a"}, {1: 2}],
    "class": [
        {"class_path": "CSVLogger"},
        {"class_path": "MLPPolicy", "init_args": {}},
        {"class_path": "torch.nn.ReLU"},
    ],
}
"""Values that replace another value, by their kind."""
CLASSES = (
    *("os.path.join", "math", "builtins.dict", "nowhere.Nothing", "SFTModule", "GymnasiumEnvs", "ConsoleProgress", ""),
    *(".", "a..b", "lrl.nothing.X", "torch.optim.Adam", "MLPPolicy", "lrl", "builtins.int", "abc.ABC"),
)
WORDS = ("learning_rate", "x", "num_envs", "class_path", "init_args", "seed", "__init__", "self", "ключ", "a.b", "1")
BROKEN = (
    *("[", "{", "}", ": :", "\t", '"', "'", "%", "&a", "*b", "!!python/object:os.system x", "- -", "\x00", "|", ">"),
    *("\ufeff", "---\n", "...\n", "? ", "@", "`", "<<: *x\n", "!x ", "{{a}}: 1\n", "2026-13-45: 1\n"),
)
DATASETS = {
    "lrl/babyai-goto/bot-v0": "lrl/BabyAI-GoToLocal-v0",
    "lrl/babyai-warm/bot-v0": "lrl/BabyAI-MixedTrainLocal-v0",
    "lrl/cartpole/controller-v0": "CartPole-v1",
    "lrl/cartpole/expert-v0": "CartPole-v1",
    "lrl/frozen_lake/expert-v0": "FrozenLake-v1",
    "lrl/frozen_lake/random-v0": "FrozenLake-v1",
    "lrl/half_cheetah/expert-v0": "HalfCheetah-v5",
    "lrl/half_cheetah/quarters-v0": "HalfCheetah-v5",
}
"""Environments of the data sets that the configurations name; a few random episodes of each are recorded."""
LIGHTER = {
    "num_functions": 4,
    "num_maps": 8,
    "group_size": 8,
    "last_layers": 1,
    "first_layers": 1,
    "num_rows": 10,
    "num_episodes": 2,
    "advised": False,
}
"""Largest values of settings that take long, or that do not fit the smaller model and data sets."""


@dataclass
class Case:
    """A mutated configuration or command line."""

    number: int
    kind: str
    words: list[str]
    """The command line."""
    text: str | None = None
    """Text of ``case.yaml``, which the command line names."""
    names: tuple[str, ...] = ()
    """The mistake: an error must contain one of these texts. Empty if the case may be correct."""
    key: str = ""
    """The key or option that is mutated."""
    value: str = ""


# Configurations.


def configurations() -> dict[str, dict[str, Any]]:
    """The shipped configurations by name, changed so that each reaches its first collection in a second."""
    found = {}
    for path in sorted((ROOT / "configs").glob("*/*.yaml")):
        if path.parent.name != "overlays":
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            _lighten(config)
            found[f"{path.parent.name}/{path.stem}"] = config
    return found


def _lighten(node: Any) -> None:
    """Replace large models and data sets, checkpoints of other runs and devices, in place."""
    if isinstance(node, list):
        for part in node:
            _lighten(part)
    if not isinstance(node, dict):
        return
    for name in ("added_tokens", "init_from", "accelerator", "quantization"):
        node.pop(name, None)
    model = node.get("language_model")
    if isinstance(model, dict) and model["name"] not in ("assets/tiny-lm", "assets/reader-lm"):
        model.pop("dtype", None)
        model["name"] = "assets/tiny-lm"
    for name, value in LIGHTER.items():
        if isinstance(node.get(name), int):
            node[name] = min(node[name], value)
    if "medium-v0" in str(node.get("dataset_id")):
        node["dataset_id"] = "lrl/half_cheetah/expert-v0"
    for part in node.values():
        _lighten(part)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a configuration, except for the configuration itself."""
    parts = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, part in parts:
        yield (*path, name)
        yield from places(part, (*path, name))


def _at(node: Any, path: Sequence[Any]) -> Any:
    for name in path:
        node = node[name]
    return node


def _misspelt(word: str, rng: random.Random) -> str:
    place = rng.randrange(len(word))
    letter = rng.choice("abcxyz_")
    return rng.choice(
        [
            word[:place] + word[place + 1 :] or "q",
            word[:place] + letter + word[place:],
            word[:place] + letter + word[place + 1 :],
            word.upper() if word.upper() != word else word + "s",
            word.replace("_", "-") if "_" in word else word + "_",
        ]
    )


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in path if part != "init_args")


def _mutated(config: dict[str, Any], kind: str, rng: random.Random) -> tuple[Any, tuple[str, ...], str, str]:
    """Return a mutated copy of a configuration, the texts of which an error must contain one, the key and the value."""
    config = copy.deepcopy(config)
    every = list(places(config))
    path = rng.choice(every)
    owner, name = _at(config, path[:-1]), path[-1]
    if kind == "misspelt key":
        path = rng.choice([one for one in every if isinstance(one[-1], str)])
        owner, name = _at(config, path[:-1]), path[-1]
        new = _misspelt(name, rng)
        items = [(new if key == name else key, value) for key, value in owner.items()]
        owner.clear()
        owner.update(items)
        return config, (new.rstrip("+"), name.rstrip("+")), _dotted(path), new
    if kind == "removed key":
        del owner[name]
        return config, (str(name), *map(str, path[-3:])), _dotted(path), ""
    if kind == "extra key":
        inner = [config, *(value for one in every if isinstance(value := _at(config, one), dict))]
        owner, word = rng.choice(inner), rng.choice(WORDS)
        owner[word] = rng.choice([1, "a", {"a": 1}])
        return config, (word, f"{word.partition('.')[0]} is", repr(owner[word])), word, repr(owner[word])
    if kind == "class":
        path = rng.choice([one for one in every if one[-1] == "class_path"])
        old = _at(config, path)
        new = rng.choice([*CLASSES, _misspelt(old, rng), _misspelt(old, rng)])
        _at(config, path[:-1])["class_path"] = new
        return config, (new or "''", new.rpartition(".")[2], _dotted(path[:-1])), _dotted(path), new
    if kind == "swapped values":
        other = rng.choice([one for one in every if one[: len(path)] != path and path[: len(one)] != one] or [path])
        elsewhere = _at(config, other[:-1])
        owner[name], elsewhere[other[-1]] = elsewhere[other[-1]], owner[name]
        names = {str(part).rstrip("+") for one in (path, other) for part in one[-3:]} - {"init_args", "class_path"}
        return config, (*sorted(names), "class_path", "contains itself"), _dotted(path), _dotted(other)
    new = rng.choice(VALUES[kind])
    owner[name] = new
    names = [
        str(one).rstrip("+") for one in path[-3:] if isinstance(one, str) and one not in ("init_args", "class_path")
    ]
    return config, (*names[-2:], repr(new)[:50], str(new)[:50]), _dotted(path), repr(new)[:50]


def _broken(text: str, rng: random.Random) -> tuple[str, str]:
    """Return the text of a configuration with an inserted sign, a cut, a wrong indentation or a duplicated key."""
    lines = text.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    how = rng.choice(["sign", "sign", "sign", "cut", "indentation", "duplicate", "removed line", "joined lines"])
    if how == "sign":
        start = rng.randrange(len(text))
        sign = rng.choice(BROKEN)
        return text[:start] + sign + text[start:], f"sign {sign!r}"
    if how == "cut":
        return text[: rng.randrange(len(text))], how
    if how == "indentation":
        lines[place] = rng.choice([" ", "   ", "\t"]) + lines[place]
    elif how == "duplicate":
        lines.insert(place, lines[place])
    elif how == "removed line":
        del lines[place]
    else:
        lines[place] = lines[place].rstrip("\n") + " "
    return "".join(lines), how


FILES = {
    "empty.yaml": b"",
    "comment.yaml": b"# nothing\n",
    "binary.yaml": bytes(range(256)) * 8,
    "zeros.yaml": b"\0" * 100,
    "latin.yaml": "trainer: {max_epochs: 3}  # für\n".encode("latin-1"),
    "list.yaml": b"- model\n- data\n",
    "word.yaml": b"model\n",
    "number.yaml": b"17\n",
    "two.yaml": b"a: 1\n---\nb: 2\n",
    "data.json": b'{"model": 3}',
    "broken.json": b'{"model": ',
    "README.md": b"# lrl\n\nLanguage models: policies.\n",
    "table.csv": b"step,return\n1,2\n",
    "alias.yaml": b"model: &a {policy: *a}\n",
    "deep.yaml": b"[" * 3000,
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
}
"""Files that are not configurations."""
PATHS = (
    *(*FILES, "folder", "folder.yaml", "missing.yaml", "missing", "folder/../missing.yaml", "/dev/null", "", ".", "~"),
    *("a\nb.yaml", "ü.yaml", "x" * 300, "frozen_lake", "frozen_lake/grpoo.yaml", "http://127.0.0.1:9/a.yaml"),
)


def configuration_case(number: int, seed: int, configs: dict[str, dict[str, Any]]) -> Case:
    """Return a mutated configuration."""
    rng = random.Random(f"configuration {seed} {number}")
    base = rng.choice(sorted(configs))
    kinds = ["misspelt key", "removed key", "extra key", "class", "class", "swapped values", "broken", "file", *VALUES]
    kind, words = rng.choice(kinds), ["lrl", "fit", "--config", "case.yaml"]
    if kind == "file":
        path = rng.choice(PATHS)
        words = rng.choice(
            [["lrl", "fit", "--config", path], [*words, "--config", path], ["lrl", "fit", f"--config={path}"]]
        )
        return Case(
            number,
            kind,
            words,
            yaml.safe_dump(configs[base], sort_keys=False),
            (path[:50], "config", "model is 3"),
            "config",
            path,
        )
    if kind == "broken":
        text, how = _broken(yaml.safe_dump(configs[base], sort_keys=False, allow_unicode=True), rng)
        return Case(number, kind, words, text, (), base, how)
    config, names, key, value = _mutated(configs[base], kind, rng)
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    return Case(number, kind, words, text, names, key, value)


# Command lines.

COMMANDS = """\
lrl fit --config cartpole/ppo_mlp.yaml --trainer.max_epochs 3 --model.init_args.optimizer.lr 1e-3 --run_directory new
lrl fit -c frozen_lake/grpo.yaml --config overlays/debug.yaml --seed_everything 7 --data.init_args.num_groups 4
lrl fit --config frozen_lake/grpo.yaml --model.init_args.policy.init_args.language_model.lora.r 4 --trainer.precision 32
lrl fit --resume run --trainer.max_epochs 9
lrl fit --ckpt_path run --trainer.max_epochs 9 --run_directory new
lrl fit --config cartpole/ppo_mlp.yaml --trainer.logger false --trainer.devices 1 --trainer.accelerator cpu
lrl validate --ckpt_path run --data.init_args.validation.episodes 4
lrl test --config cartpole/ppo_mlp.yaml --ckpt_path run/checkpoints/last.ckpt --verbose false
lrl predict --ckpt_path run --trainer.limit_predict_batches 1
lrl evaluate --policy random --env_id FrozenLake-v1 --episodes 2 --num_envs 2 --seed 3 --json out.json
lrl evaluate --policy expert --env_kwargs {"map_name":"8x8"} --episodes 2 --success_at last_step
lrl evaluate --checkpoint run --episodes 2 --temperature 1 --accelerator cpu --devices 1 --precision 32-true
lrl evaluate --model assets/tiny-lm --choose --env_id CartPole-v1 --episodes 1 --num_envs 1 --dtype float32
lrl watch --policy expert --env_id FrozenLake-v1 --seed 3 --turns 2 --frames frames
lrl watch --checkpoint run --turns 2 --temperature 0.5
lrl serve_env --env_id FrozenLake-v1 --package package --reward_range 0 1
lrl serve_env --env_id FrozenLake-v1 --port 0 --host 127.0.0.1 --max_sessions 2 --max_invalid 3
lrl merge --checkpoint adapted --output_dir merged --dtype float32
lrl collect --policy expert --env_id FrozenLake-v1 --dataset_id lrl/lake/new-v0 --episodes 2 --jsonl out.jsonl
lrl collect --policy run --dataset_id lrl/pole/new-v0 --episodes 2 --num_envs 2 --random_share 0.5 --seed 1
lrl collect --dataset_id lrl/cartpole/expert-v0 --env_id CartPole-v1 --jsonl out.jsonl --ranges --statistics
lrl plot run other --metric val/return --clock env_steps --baseline best=500 --title t --out curve.png
lrl table run other --metric val/return
lrl compare run --baseline run --metric val/return --bootstrap
lrl run_seeds --config cartpole/ppo_mlp.yaml --count 2 --folder seeds --jobs 1 --trainer.max_epochs 3
lrl sweep --config cartpole/ppo_mlp.yaml --set model.init_args.optimizer.lr=2e-4,1e-3 --seeds 2 --jobs 1 --folder sweep
lrl sweep --config cartpole/ppo_mlp.yaml --set data.init_args.num_epochs=1,2 --slurm
lrl zero_shot --model assets/tiny-lm --json shot.json --env_id CartPole-v1 --policies chooses --episodes 1 --num_envs 1
lrl success_table --policy random --env_id CartPole-v1 FrozenLake-v1 --episodes 2 --figure success --json table.json
lrl success_table --checkpoint a=run b=other --env_id CartPole-v1 --episodes 1 --temperature 1
lrl search_table --folder search --tasks maze --methods random_search --seeds 1 --iterations 2 --rollouts 1
lrl synthetic_search --functions 2 --iterations 2 --seed 1 --json synthetic.json
lrl synthetic_search --write histories.jsonl --functions 2 --held_out
lrl expert_q --map_name 4x4 --slippery --out q.csv --gamma 0.9 --episodes 2 --seed 1
lrl fetch smollm2
"""
"""One valid command line of each kind; they read ``run``, ``other`` and ``adapted``, three runs of a few seconds."""
TEXTS = (
    *("", "abc", "-1", "0", "1", "-0.5", "nan", "inf", "-inf", "1e300", "9" * 30, "2.5", "null", "None", "true", "[]"),
    *(
        "[1",
        "{}",
        '{"a": 1',
        '{"a": 1}',
        "ü",
        "🎲",
        "x" * 5000,
        "missing",
        "folder",
        "binary.yaml",
        "/dev",
        "a b",
        "a=b",
    ),
    *("--", "-", "=", "%s", "{}{}", "1,2", ",", "../..", "a\nb", "run", "auto", "FrozenLake-v1", "Nothing-v0"),
)
OTHERS = (
    *("--episodes", "--runs", "--policy", "--config", "--json", "--trainer.max_epochs", "--help", "-x", "--", "-"),
    *("--env_id", "--slippery", "--jobs", "--print_config", "--model.help", "--version", "--no", "--=", "--a.b.c"),
)


def command_case(number: int, seed: int) -> Case:
    """Return a mutated command line."""
    rng = random.Random(f"command {seed} {number}")
    words = shlex.split(rng.choice(COMMANDS.splitlines()).replace('"', '\\"'))
    options = [place for place, word in enumerate(words) if word.startswith("-")]
    valued = [place for place in range(3, len(words)) if not words[place].startswith("-")] or [len(words) - 1]
    kinds = ["misspelt option", "repeated option", "missing value", "removed option", "other option", "subcommand"]
    kind = rng.choice([*kinds, *["wrong value"] * 6, "moved words", "equals sign", "extra word"])
    if kind in ("misspelt option", "repeated option", "missing value", "removed option") and not options:
        kind = "wrong value"
    names: tuple[str, ...] = ()
    value = key = ""
    if kind == "misspelt option":
        place = rng.choice(options)
        key, value = words[place], "--" + _misspelt(words[place].lstrip("-"), rng)
        words[place], names = value, (value.lstrip("-"), key.lstrip("-"), value[2:].partition(".")[0])
    elif kind == "repeated option":
        place = rng.choice(options)
        key = words[place]
        words += words[place : place + 1 + (place + 1 in valued)]
    elif kind == "missing value":
        place = rng.choice(options)
        key = words[place]
        del words[place + 1 : place + 1 + (place + 1 in valued)]
    elif kind == "removed option":
        place = rng.choice(options)
        key = words[place]
        del words[place : place + 1 + (place + 1 in valued)]
    elif kind == "other option":
        value = rng.choice(OTHERS)
        words[rng.randrange(2, len(words) + 1) : 0] = [value, *rng.choice([[], ["1"], ["a"]])]
        key = value
    elif kind == "subcommand":
        value = rng.choice([_misspelt(words[1], rng), "", "run", "ü", "-", "--", "train", words[1].upper(), "help"])
        key, words[1], names = words[1], value, (repr(value), value)
    elif kind == "wrong value":
        place = rng.choice(valued)
        key = words[place - 1] if words[place - 1].startswith("-") else "positional"
        words[place] = value = rng.choice(TEXTS)
        names = (value[:50], repr(value), key.lstrip("-"), key.rpartition(".")[2])
    elif kind == "moved words":
        rest = words[1:]
        rng.shuffle(rest)
        words[1:] = rest
    elif kind == "equals sign":
        place = rng.choice(options or [len(words) - 1])
        key = words[place]
        words[place : place + 2] = ["=".join(words[place : place + 2])]
    else:
        value = rng.choice(TEXTS)
        words.insert(rng.randrange(2, len(words) + 1), value)
    return Case(number, kind, words, None, names, key, value)
