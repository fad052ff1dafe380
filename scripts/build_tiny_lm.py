"""Build the embedded language model: tokenizer, architecture, and weights that are trained on response formats only.

The responses in its training data are random legal actions, independent of the observation, after reasoning sampled
from ``grammar.json``. Its responses therefore have the right format, and it prefers no action.

    python scripts/build_tiny_lm.py --output assets/tiny-lm --seed 0
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR

from lrl.cli.command import command
from lrl.codecs.toy_text import FrozenLakeCodec, render_map
from lrl.lm.chat_template import CHATML
from lrl.prompts import Message, get_response_format

ASSETS = Path(__file__).parents[1] / "assets" / "tiny-lm"
GRAMMAR: dict[str, Any] = json.loads((ASSETS / "grammar.json").read_text(encoding="utf-8"))
TAGS = ("think", "answer", "observation", "action")
SPECIALS = (
    "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>",
    *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
)  # fmt: skip
NUMBERS = tuple(f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width))
PIECES = r"[0-9]{1,3}| ?\p{L}+| ?[^\s\p{L}0-9]|\s"
"""Pattern of pre-tokens: at most three digits, words with the space before them, and single other characters."""
MAX_VOCABULARY = 2048
MAX_TOKENS = 2048


def say(rng: random.Random, text: str, **given: str) -> str:
    """Replace each ``{symbol}`` by its text in ``given``, or by a random one of the grammar's texts for it."""
    return re.sub(
        r"\{([a-z ]+)\}", lambda found: given.get(found[1]) or say(rng, rng.choice(GRAMMAR[found[1]]), **given), text
    )


def lake(rng: random.Random) -> str:
    """Return a FrozenLake map with random holes and the agent on a random cell that does not end the episode."""
    rows, columns = rng.choice([(4, 4), (4, 4), (4, 4), (8, 8), (rng.randint(3, 7), rng.randint(3, 7))])
    ice = rng.uniform(0.6, 0.95)
    cells = ["F" if rng.random() < ice else "H" for _ in range(rows * columns)]
    cells[0], cells[-1] = "S", "G"
    state = rng.choice([index for index, cell in enumerate(cells) if cell in "SF"])
    text = "".join(cells)
    return render_map(state, [text[row * columns : (row + 1) * columns] for row in range(rows)])


def numbers(rng: random.Random) -> str:
    """Return a vector as integers from 0 to 999, as decimals, or with names."""
    count = rng.randint(1, 8)
    if rng.random() < 0.4:
        return f"<observation>{','.join(str(rng.randrange(1000)) for _ in range(count))}</observation>"
    decimals = [f"{rng.gauss(0, 1):.{rng.choice((2, 3, 5))}f}" for _ in range(count)]
    if rng.random() < 0.5:
        return f"<observation>{','.join(decimals)}</observation>"
    return "\n".join(f"{say(rng, '{quantity}')} {value}" for value in decimals)


# -- scenes: description of an environment, its observations and its actions -------------------------------------------

Speak = Callable[[random.Random], str]
"""Function that returns a random text."""
OBSERVE: dict[str, Speak] = {
    "lake": lake,
    "numbers": numbers,
    "rooms": lambda rng: say(rng, "{rooms}"),
    "town": lambda rng: say(rng, "{town}"),
}


@dataclass(frozen=True)
class Scene:
    """One generated environment."""

    description: str
    """Description for the system message."""
    observe: Speak
    """Returns a random observation."""
    act: Speak
    """Returns a random action."""


def frozen_lake(rng: random.Random) -> Scene:
    """Return FrozenLake, with the description of its codec."""
    codec = FrozenLakeCodec()
    return Scene(codec.description, lake, lambda r: r.choice(codec.action_texts))


def listed(rng: random.Random) -> Scene:
    """Return an environment whose actions are listed in its description only."""
    kind, about = rng.choice(GRAMMAR["scenes"])
    digits = [str(n) for n in range(rng.randint(2, 18))]
    names = digits if rng.random() < 0.15 else rng.sample(GRAMMAR["actions"], rng.randint(2, 7))
    description = f"{say(rng, about)} Actions: {', '.join(names)}."
    return Scene(description, OBSERVE[kind], lambda r: r.choice(names))


def boxed(rng: random.Random) -> Scene:
    """Return an environment whose actions are vectors of numbers."""
    kind, about = rng.choice([scene for scene in GRAMMAR["scenes"] if scene[0] == "numbers"])
    count, integers = rng.randint(1, 6), rng.random() < 0.6
    number: Speak = (lambda r: str(r.randrange(1000))) if integers else (lambda r: f"{r.uniform(-1, 1):.3f}")
    values = "integers from 0 to 999" if integers else "decimals from -1 to 1"
    description = f"{about} Actions: {count} {values} inside <action></action>, separated by commas."
    return Scene(description, OBSERVE[kind], lambda r: f"<action>{','.join(number(r) for _ in range(count))}</action>")


def quote(observation: str) -> str:
    """Return the start of ``observation``: at most four words, or two numbers, of its first line."""
    line = re.sub(r"</?observation>", "", observation.split("\n")[0])
    return ",".join(line.split(",")[:2]) if "," in line else " ".join(line.split(" ")[:4])


def conversation(rng: random.Random) -> list[Message]:
    """Return a system message and one to four turns with random responses."""
    scene = rng.choices([frozen_lake, listed, boxed], [5, 4, 1])[0](rng)
    style = get_response_format(rng.choices(["think_answer", "final_answer", "direct"], [6, 2, 2])[0])
    messages = [{"role": "system", "content": f"{scene.description} {style.instruction}"}]
    for _ in range(rng.choices([1, 2, 3, 4], [4, 2, 1, 1])[0]):
        refused = "Invalid action: the action must be one of those above.\n" if rng.random() < 0.05 else ""
        seen = scene.observe(rng)
        thought = say(rng, "{reasoning}", quote=quote(seen))
        messages.append({"role": "user", "content": refused + seen})
        messages.append({"role": "assistant", "content": style.render(scene.act(rng), thought)})
    return messages


# -- tokenizer --------------------------------------------------------------------------------------------------------


def build_tokenizer(seed: int) -> Any:
    """Train a byte-level BPE tokenizer on generated conversations; numbers of up to three digits are tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary, merges = _learn_merges(seed)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False, model_max_length=MAX_TOKENS, padding_side="left",
    )  # fmt: skip
    fast.chat_template = CHATML
    return fast


def _pre_tokenizer() -> Any:
    from tokenizers import Regex, pre_tokenizers

    chunks = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    return pre_tokenizers.Sequence([chunks, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _learn_merges(seed: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ids of special tokens, bytes, numbers and merged words, in this order, and the merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fixed = list(dict.fromkeys([*SPECIALS, *alphabet, *NUMBERS]))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    size = MAX_VOCABULARY - len(fixed) + len(alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(_texts(seed), trainer)
    learned = json.loads(learner.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokens = list(dict.fromkeys([*fixed, *words]))
    return {token: index for index, token in enumerate(tokens)}, [tuple(pair) for pair in learned["merges"]]


def _texts(seed: int, count: int = 6000) -> Iterator[str]:
    """Yield the text from which merges are learned, without digits and tags, which are tokens of their own."""
    rng = random.Random(f"corpus {seed}")
    drop = str.maketrans("", "", "0123456789")
    yield from (f"{word}\nActions: {word}, {word}." for word in GRAMMAR["actions"] for _ in range(50))
    for _ in range(count):
        for message in conversation(rng):
            text = message["content"].translate(drop)
            for tag in SPECIALS:
                text = text.replace(tag, "\n")
            yield f"{message['role']}\n{text}"


def build_model(tokenizer: Any, seed: int) -> Any:
    """Return a new model, in which words with and without a space before them have similar initial embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=160, intermediate_size=448, num_hidden_layers=3, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=MAX_TOKENS, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        table: Any = model.get_input_embeddings().weight
        for token, index in vocabulary.items():
            bare = vocabulary.get(token.removeprefix("Ġ"))
            if bare is not None and bare != index:
                table[index] = table[bare] + 0.25 * table[index]
    return model


def batches(tokenizer: Any, seed: int, steps: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` batches of about ``tokens`` tokens, each of conversations of similar length; see :func:`pad`."""
    rng = random.Random(f"chats {seed}")
    ready: list[list[list[int]]] = []
    for _ in range(steps):
        if not ready:
            texts = tokenizer.apply_chat_template([conversation(rng) for _ in range(2000)], tokenize=False)
            ready = bucket(tokenizer(texts, add_special_tokens=False)["input_ids"], tokens)
            rng.shuffle(ready)
        yield pad(ready.pop(), tokenizer)


def bucket(chats: list[list[int]], tokens: int) -> list[list[list[int]]]:
    """Cut conversations, sorted by length, into batches of at most ``tokens`` padded tokens."""
    buckets: list[list[list[int]]] = [[]]
    for chat in sorted(chats, key=len):
        if (len(buckets[-1]) + 1) * len(chat) > tokens:
            buckets.append([])
        buckets[-1].append(chat)
    return buckets


def pad(chats: list[list[int]], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return ids ``(row, token)``, padded on the right, and a mask of the responses' tokens, end token included."""
    ids = pad_sequence([torch.tensor(chat) for chat in chats], True, tokenizer.pad_token_id)
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for row, chat in enumerate(chats):
        for at in range(len(chat) - len(opening)):
            if chat[at : at + len(opening)] == opening:
                answers[row, at + len(opening) : chat.index(tokenizer.eos_token_id, at) + 1] = True
    return ids, answers


def warm_up_and_decay(optimizer: torch.optim.Optimizer, warm_up: int, steps: int) -> LambdaLR:
    """Return a schedule that increases the learning rate for ``warm_up`` steps, and decays it to 0 along a cosine."""
    return LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )


def train(model: Any, stream: Iterator[tuple[Tensor, Tensor]], steps: int, peak: float = 3e-3) -> None:
    """Train on the tokens of the responses only; the learning rate warms up and decays to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = warm_up_and_decay(optimizer, 40, steps)
    started = time.perf_counter()
    for step, (ids, answers) in enumerate(stream):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        asked = answers[:, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[asked]), ids[:, 1:][asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)


def build(*, output: Path = Path("assets/tiny-lm"), seed: int = 0, steps: int = 600, batch_tokens: int = 5000) -> None:
    """Build and save the model and its tokenizer.

    Args:
        output: folder to write.
        seed: seed of the tokenizer's texts, the initial weights and the training data.
        steps: number of training steps.
        batch_tokens: maximum number of tokens of a batch, padding included.
    """
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer, seed)
    train(model, batches(tokenizer, seed, steps, batch_tokens), steps)
    model.generation_config.do_sample = True
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    command(build)("build_tiny_lm.py", sys.argv[1:])
