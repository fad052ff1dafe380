"""Build the embedded language model: tokenizer, architecture, and weights that know the format of answers only.

Every answer it is taught is a legal action drawn at random, whatever the observation, behind reasoning that says
nothing. So it speaks in the right format and prefers no action.

    python scripts/build_tiny_lm.py --output assets/tiny-lm --seed 0
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrl.codecs.grid import FrozenLakeCodec, draw
from lrl.policies.chat import CHATML
from lrl.prompts.response_format import response_format
from lrl.prompts.template import Message

TAGS = ("think", "answer", "observation", "action")
SPECIALS = (
    "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>",
    *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
)  # fmt: skip
NUMBERS = tuple(f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width))
PIECES = r"[0-9]{1,3}| ?\p{L}+| ?[^\s\p{L}0-9]|\s"
"""Chunks of at most three digits, words with the blank before them, single other characters."""
MAX_VOCABULARY = 2048
MAX_TOKENS = 2048

# -- what is said -----------------------------------------------------------------------------------------------------


def one_of(rng: random.Random, words: str) -> str:
    """One of the alternatives in ``a|b|c``."""
    return rng.choice(words.split("|"))


def reasoning(rng: random.Random) -> str:
    """5 to 11 words that fit any state and name no action."""
    start = one_of(rng, "let me|I will|I can|now I|first I|here I|I should|I must|time to|again I")
    verb = one_of(rng, "think|look|see|wait|check|study this|plan|watch")
    manner = one_of(rng, "with care|around|for a moment|once more|and learn|about it|at this")
    close = one_of(
        rng,
        "then I choose one|then I decide|and then I choose|so I decide now|this seems good to me|this may well work|"
        "this looks fine so far|it could help me|and try this now|one choice seems best|I trust this one",
    )
    return f"{start} {verb} {manner}, {close}."


def lake(rng: random.Random) -> str:
    """A FrozenLake map of random holes with the agent on any cell that ends nothing."""
    rows, columns = rng.choice([(4, 4), (4, 4), (4, 4), (8, 8), (rng.randint(3, 7), rng.randint(3, 7))])
    ice = rng.uniform(0.6, 0.95)
    cells = ["F" if rng.random() < ice else "H" for _ in range(rows * columns)]
    cells[0], cells[-1] = "S", "G"
    state = rng.choice([index for index, cell in enumerate(cells) if cell in "SF"])
    text = "".join(cells)
    return draw(state, [text[row * columns : (row + 1) * columns] for row in range(rows)])


def rooms(rng: random.Random) -> str:
    """Sentences of BabyAI-Text."""
    lines = [f"You carry a {thing(rng)}"] if rng.random() < 0.2 else []
    for _ in range(rng.randint(1, 5)):
        seen = "wall" if rng.random() < 0.4 else thing(rng)
        side = f"{steps(rng)} {one_of(rng, 'left|right')}"
        place = rng.choice([f"{steps(rng)} forward", side, f"{side} and {steps(rng)} forward"])
        lines.append(f"You see a {seen} {place}")
    return "\n".join(lines)


def thing(rng: random.Random) -> str:
    """A coloured object."""
    color = one_of(rng, "red|green|blue|purple|yellow|grey")
    return f"{one_of(rng, 'open|closed|locked')} {color} door" if rng.random() < 0.2 else (
        f"{color} {one_of(rng, 'ball|box|key')}"
    )


def steps(rng: random.Random) -> str:
    """``1 step``, ``2 steps`` ..."""
    count = rng.randint(1, 7)
    return f"{count} step{'s' * (count > 1)}"


def numbers(rng: random.Random) -> str:
    """A vector as integers from 0 to 999, as decimals, or with names."""
    count = rng.randint(1, 8)
    if rng.random() < 0.4:
        return f"<observation>{','.join(str(rng.randrange(1000)) for _ in range(count))}</observation>"
    decimals = [f"{rng.gauss(0, 1):.{rng.choice((2, 3, 5))}f}" for _ in range(count)]
    if rng.random() < 0.5:
        return f"<observation>{','.join(decimals)}</observation>"
    part = (
        "cart position|cart velocity|pole angle|pole angular velocity|position|velocity|x|y|z|cosine|sine|torso height|"
        "front thigh|front shin|front foot|back thigh|back shin|back foot|hip|knee|joint angle|arm|leg|speed|target"
    )
    return "\n".join(f"{one_of(rng, part)} {value}" for value in decimals)


def town(rng: random.Random) -> str:
    """The words of Taxi and CliffWalking."""
    place = "red|green|yellow|blue"
    passenger = f"at the {one_of(rng, place)} location" if rng.random() < 0.7 else "in the taxi"
    row, column = rng.randrange(12), rng.randrange(12)
    if rng.random() < 0.4:
        return f"You are at row {row} column {column}."
    return (
        f"The taxi is at row {row} column {column}. The passenger is {passenger}. "
        f"The destination is the {one_of(rng, place)} location."
    )


def goal(rng: random.Random) -> str:
    """A mission of BabyAI."""
    return rng.choice([
        f"go to the {thing(rng)}",
        f"pick up a {thing(rng)}",
        f"open the {thing(rng)}",
        f"put the {thing(rng)} next to the {thing(rng)}",
        f"pick up the {thing(rng)} then go to the {thing(rng)}",
        f"go to a {thing(rng)} after you pick up the {thing(rng)}",
    ])  # fmt: skip


# -- scenes: what the system text says, what is observed, what may be answered -----------------------------------------

Observe = Callable[[random.Random], str]
Act = Callable[[random.Random], str]


@dataclass(frozen=True)
class Scene:
    """One generated environment."""

    description: str
    observe: Observe
    act: Act


WORDS = (
    "turn left|turn right|go forward|pick up|drop|toggle|done|LEFT|DOWN|RIGHT|UP|left|right|up|down|north|south|east|"
    "west|pickup|dropoff|push left|push right|no push|wait|stay|jump|open|close|accelerate left|accelerate right|"
    "accelerate|brake|forward|back|NORTH|SOUTH|EAST|WEST|STAY|yes|no|apply torque|do nothing"
).split("|")
ABOUT: tuple[tuple[Observe, str], ...] = (
    (lake, "You walk on a frozen lake. Reach G and avoid H."),
    (lake, "You cross a lake. A is you, F is ice, H is a hole, G is the goal."),
    (rooms, "You are an agent in a room and see only what is ahead. Your goal is to {goal}."),
    (rooms, "You navigate in a grid. Goal: {goal}."),
    (numbers, "You balance a pole on a cart. Keep the pole upright and the cart near the center."),
    (numbers, "You drive a car in a valley. Reach the top of the hill on the right."),
    (numbers, "You control the joints of a robot. Run forward as fast as you can with little energy."),
    (numbers, "You swing a pendulum with two links. Lift the tip above the line."),
    (town, "You drive a taxi. Pick up the passenger and drop off at the destination."),
    (town, "You walk along a cliff on a grid of 4 rows and 12 columns. Do not fall; reach the goal."),
)


def frozen_lake(rng: random.Random) -> Scene:
    """The environment that the first experiments train on, in its own words."""
    codec = FrozenLakeCodec()
    return Scene(codec.description, lake, lambda r: r.choice(codec.action_texts))


def listed(rng: random.Random) -> Scene:
    """Any environment with a list of actions that only its system text tells."""
    observe, about = rng.choice(ABOUT)
    names = [str(n) for n in range(rng.randint(2, 18))] if rng.random() < 0.15 else rng.sample(WORDS, rng.randint(2, 7))
    order = f"Actions: {', '.join(names)}."
    return Scene(f"{about.format(goal=goal(rng))} {order}", observe, lambda r: r.choice(names))


def boxed(rng: random.Random) -> Scene:
    """Any environment with a vector of numbers as action."""
    observe, about = rng.choice(ABOUT[4:8])
    count, integers = rng.randint(1, 6), rng.random() < 0.6
    number: Act = (lambda r: str(r.randrange(1000))) if integers else (lambda r: f"{r.uniform(-1, 1):.3f}")
    kind = "integers from 0 to 999" if integers else "decimals from -1 to 1"
    order = f"Actions: {count} {kind} inside <action></action>, separated by commas."
    return Scene(f"{about} {order}", observe, lambda r: f"<action>{','.join(number(r) for _ in range(count))}</action>")


def conversation(rng: random.Random) -> list[Message]:
    """System text, then one to four turns whose answers are all random."""
    scene = rng.choices([frozen_lake, listed, boxed], [5, 4, 1])[0](rng)
    style = response_format(rng.choices(["think_answer", "final_answer", "direct"], [6, 2, 2])[0])
    messages = [{"role": "system", "content": f"{scene.description} {style.instruction}"}]
    for _ in range(rng.choices([1, 2, 3, 4], [4, 2, 1, 1])[0]):
        refused = "Invalid action: the action must be one of those above.\n" if rng.random() < 0.05 else ""
        messages.append({"role": "user", "content": refused + scene.observe(rng)})
        messages.append({"role": "assistant", "content": style.render(scene.act(rng), reasoning(rng))})
    return messages


# -- tokenizer --------------------------------------------------------------------------------------------------------


def build_tokenizer(seed: int) -> Any:
    """Byte-level BPE over generated conversations, with every number of up to three digits added whole."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary, merges = _learn_merges(seed)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    assert isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Sequence)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False, model_max_length=MAX_TOKENS, padding_side="left",
    )  # fmt: skip
    fast.chat_template = CHATML
    return fast


def _pre_tokenizer() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def _learn_merges(seed: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids of special tokens, bytes, numbers and merged words, in this order; and the merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fixed = list(dict.fromkeys([*SPECIALS, *alphabet, *NUMBERS]))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    room = MAX_VOCABULARY - len(fixed)
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + room, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    learner.train_from_iterator(_texts(seed), trainer)
    learned = json.loads(learner.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokens = list(dict.fromkeys([*fixed, *words]))
    return {token: index for index, token in enumerate(tokens)}, [tuple(pair) for pair in learned["merges"]]


def _texts(seed: int, count: int = 6000) -> Iterator[str]:
    """What the merges are learned from: no digits and no tags, which are tokens of their own."""
    rng = random.Random(f"corpus {seed}")
    drop = str.maketrans("", "", "0123456789")
    yield from (f"{word}\nActions: {word}, {word}." for word in WORDS for _ in range(50))
    for _ in range(count):
        for message in conversation(rng):
            text = message["content"].translate(drop)
            for tag in SPECIALS:
                text = text.replace(tag, "\n")
            yield f"{message['role']}\n{text}"


# -- weights ----------------------------------------------------------------------------------------------------------


def build_model(tokenizer: Any, seed: int) -> Any:
    """The architecture with fresh weights. Words that differ in the blank before them only start out alike."""
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
        table = model.get_input_embeddings().weight
        for token, index in vocabulary.items():
            bare = vocabulary.get(token.removeprefix("Ġ"))
            if bare is not None and bare != index:
                table[index] = table[bare] + 0.25 * table[index]
    return model


@dataclass(frozen=True)
class Batch:
    """Right-padded conversations: ids ``(row, token)`` and which of them are answers."""

    ids: Tensor
    answers: Tensor


def batches(tokenizer: Any, seed: int, steps: int, tokens: int) -> Iterator[Batch]:
    """``steps`` batches of about ``tokens`` tokens, each of conversations of similar length."""
    rng = random.Random(f"chats {seed}")
    ready: list[list[list[int]]] = []
    for _ in range(steps):
        if not ready:
            ready = _bucket(_encode(tokenizer, [conversation(rng) for _ in range(2000)]), tokens)
            rng.shuffle(ready)
        yield _batch(ready.pop(), tokenizer)


def _encode(tokenizer: Any, chats: Sequence[list[Message]]) -> list[list[int]]:
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _bucket(chats: list[list[int]], tokens: int) -> list[list[list[int]]]:
    chats = sorted(chats, key=len)
    buckets: list[list[list[int]]] = [[]]
    for chat in chats:
        if (len(buckets[-1]) + 1) * len(chat) > tokens:
            buckets.append([])
        buckets[-1].append(chat)
    return buckets


def _batch(rows: list[list[int]], tokenizer: Any) -> Batch:
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    start, assistant = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.encode("assistant")[0]
    answers = torch.zeros_like(ids, dtype=torch.bool)
    for row, chat in enumerate(rows):
        for at, token in enumerate(chat):
            if token == start and chat[at + 1] == assistant:
                end = chat.index(tokenizer.eos_token_id, at)
                answers[row, at + 3 : end + 1] = True
    return Batch(ids, answers)


def train(model: Any, stream: Iterator[Batch], steps: int, peak: float = 3e-3) -> float:
    """Supervise the answers' tokens only; the learning rate warms up and falls to zero. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    factor = lambda step: min(1.0, (step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * step / steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss, started = torch.zeros(()), time.perf_counter()
    for step, batch in enumerate(stream):
        hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
        asked = batch.answers[:, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[asked]), batch.ids[:, 1:][asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - started:6.1f} s", flush=True)
    return loss.item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and save everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("assets/tiny-lm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch_tokens", type=int, default=5000)
    options = parser.parse_args(arguments)
    tokenizer = build_tokenizer(options.seed)
    model = build_model(tokenizer, options.seed)
    train(model, batches(tokenizer, options.seed, options.steps, options.batch_tokens), options.steps)
    model.generation_config.do_sample = True
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
