"""Small tokenizers and chat templates that differ as those of published models do, saved as local folders."""

import json
from pathlib import Path

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for m in messages %}"
CHATML = f"{EACH}{TURN}{{% endfor %}}{OPEN}"
QWEN3_THINKING = (
    EACH
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN3_SILENT = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif")
NEMOTRON = (  # an empty reasoning before past responses
    CHATML.replace("{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}").replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )
)
GLM = EACH + (
    "<|{{ m.role }}|>\n{{ '<think></think>\n' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWER_TAG = CHATML.replace("assistant\n{% endif", "assistant\n<answer>{% endif")
DEEPSEEK_R1 = (
    "{{ bos_token }}"
    + EACH
    + "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    + "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + EACH
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    + "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    + EACH
    + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # the system text goes before the last user's
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ (s if loop.last else '') + m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
ESCAPES = CHATML.replace("{{ m.content }}", "{{ m.content | e }}")
STRIPS_CONTENT = CHATML.replace("{{ m.content }}", "{{ ('so\n\n' + m.content).strip() }}")
NO_THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<|START_THINKING|><|END_THINKING|>{% endif")
VICUNA = EACH + "{{ ('ASSISTANT: ' if m.role == 'assistant' else 'USER: ') + m.content + ' ' }}{% endfor %}"
DROPS_SYSTEM = CHATML.replace(TURN, "{% if m.role != 'system' %}" + TURN + "{% endif %}")
DROPS_USER = CHATML.replace(TURN, "{% if m.role != 'user' %}" + TURN + "{% endif %}")
ONE_TURN = CHATML.replace(TURN, "{% if m.role == 'system' or loop.last %}" + TURN + "{% endif %}")
RAISES_ON_TURNS = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML
NO_GENERATION_PROMPT = CHATML.replace(OPEN, "")
DIALOGPT = EACH + "{{ m.content }}{{ eos_token }}{% endfor %}"
ROLE_TAGS = (
    EACH
    + "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BROKEN = "{{ messages[0].content + 1 }}"

VOCABULARIES = {
    "gpt2": {"eos": "<|endoftext|>", "bos": "<|endoftext|>"},
    "qwen": {"eos": "<|im_end|>", "pad": "<|endoftext|>", "more": ["<|im_start|>"], "tags": ["<think>", "</think>"]},
    "qwen_base": {"eos": "<|endoftext|>", "pad": "<|endoftext|>", "more": ["<|im_start|>", "<|im_end|>"]},
    "llama3": {
        "eos": "<|end_of_text|>",
        "bos": "<|begin_of_text|>",
        "more": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"],
        "adds": "<|begin_of_text|> $A",
    },
    "llama2": {"eos": "</s>", "bos": "<s>", "unk": "<unk>", "adds": "<s> $A", "pieces": True},
    "adds_both": {"eos": "</s>", "bos": "<s>", "unk": "<unk>", "adds": "<s> $A </s>", "pieces": True},
    "gemma": {
        "eos": "<eos>",
        "bos": "<bos>",
        "pad": "<pad>",
        "unk": "<unk>",
        "more": ["<start_of_turn>", "<end_of_turn>"],
        "adds": "<bos> $A",
        "pieces": True,
        "prepends": False,
    },
    "deepseek": {"eos": "<|end|>", "bos": "<|begin|>", "more": ["<|User|>", "<|Assistant|>"], "adds": "<|begin|> $A"},
    "ordinary_roles": {"eos": "<|end|>", "bos": "<|begin|>", "tags": ["<|User|>", "<|Assistant|>", "  "]},
    "phi3": {"eos": "<|end|>", "bos": "<s>", "more": ["</s>"]},
    "padded_by_a_character": {"eos": "<|end|>", "pad": "!"},
    "endless": {"pad": "<|pad|>"},
}
MERGES = ["!!", 'n"', "an", "le", "ft", "left", "er", "swer", "<an", ">\n", "</", "ri", "ght", "th", "ink"]


def byte_tokenizer():
    """Byte-level BPE as in GPT-2, with ``!`` as token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokens, merges = sorted(level.alphabet()), []
    assert tokens[0] == "!"
    for text in MERGES:
        text = level.pre_tokenize_str(text)[0][0] if " " not in text and "\n" not in text else text.replace("\n", "Ċ")
        parts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in parts if {*pair} <= {*tokens}]
        if known:
            merges.append(known[0])
            tokens.append(text)
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    return tokenizer


def piece_tokenizer(special, prepends):
    """BPE of characters as SentencePiece exports it, whose other characters are written as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = [*special, *(f"<0x{n:02X}>" for n in range(256)), "▁", *map(chr, range(33, 127)), "▁l", "▁le", "ft"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: n for n, token in enumerate(tokens)},
            [("▁", "l"), ("▁l", "e"), ("f", "t")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Prepend("▁")] * prepends + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*steps])
    return tokenizer


def save_odd_folder(folder, vocabulary, template=CHATML, generation=None):
    """Write tokenizer, template and maybe a ``generation_config.json``; return the folder's name.

    Args:
        folder: where.
        vocabulary: one of :data:`VOCABULARIES`.
        template: Jinja text; None has none.
        generation: ``eos_token_id`` as tokens, one text or a list; or the text of a damaged file.
    """
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    about = VOCABULARIES[vocabulary]
    named = {f"{name}_token": about[name] for name in ("bos", "eos", "pad", "unk") if name in about}
    special = list(dict.fromkeys([*named.values(), *about.get("more", [])]))
    tokenizer = piece_tokenizer(special, about.get("prepends", True)) if about.get("pieces") else byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in about.get("tags", [])])
    if "adds" in about:
        ids = [(text, tokenizer.token_to_id(text)) for text in about["adds"].split() if text != "$A"]
        tokenizer.post_processor = TemplateProcessing(single=about["adds"], special_tokens=ids)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    fast.save_pretrained(folder)
    if isinstance(generation, str) and generation.startswith("{"):
        Path(folder, "generation_config.json").write_text(generation)
    elif generation is not None:
        ends = fast.convert_tokens_to_ids(generation)
        Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return str(folder)


def add_model(folder):
    """Write a random Llama of hidden size 16 for the tokenizer of a folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    had = Path(folder, "generation_config.json").exists()
    kept = Path(folder, "generation_config.json").read_text() if had else None
    model.save_pretrained(folder)
    Path(folder, "generation_config.json").unlink(missing_ok=True)
    if kept is not None:
        Path(folder, "generation_config.json").write_text(kept)
    return str(folder)
