"""SFT's loss and gradients against Hugging Face's ``labels`` loss and TRL's ``SFTTrainer``, on the same token ids."""

import pytest
import torch

from lrl.algorithms.sft import SFTModule
from lrl.data.demonstration_tokens import collate_demonstrations
from lrl.lm.config import LanguageModelConfig
from lrl.policies.text import TextPolicy
from lrl.prompts import PromptTemplate
from lrl.types import SamplingConfig

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

PROMPTS, SIZES = [7, 3, 11, 7, 5, 9], [4, 1, 3, 9, 2, 5]
DTYPES = ["float32", "float64"]


@pytest.fixture(scope="module", params=DTYPES)
def trainer(request, tiny_model, tmp_path_factory):
    """TRL's own trainer, on the CPU."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    arguments = SFTConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, request.param))
    rows = Dataset.from_list([{"prompt": "w1 w2", "completion": "w3"}])
    made = SFTTrainer(model=model, args=arguments, train_dataset=rows)
    made.model.train()
    return made


def demonstrations(seed=0):
    """Prompts that begin with two equal tokens, and answers, all of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(1, 48, (length,), generator=generator).tolist()

    return [[1, 2, *draw(length)] for length in PROMPTS], [draw(length) for length in SIZES]


def ours(folder, dtype, pack_tokens, prompts, responses):
    """Loss of a training step, and its gradient."""
    policy = TextPolicy(
        LanguageModelConfig(name=folder, dtype=dtype), PromptTemplate(), SamplingConfig(), pack_tokens=pack_tokens
    )
    module = SFTModule(policy)
    module.configure_model()
    module.optimizers = lambda **_: torch.optim.SGD(policy.parameters(), lr=1.0)  # there is no trainer to have one
    return with_gradient(module.training_step(collate_demonstrations(prompts, responses)), policy)


def with_gradient(loss, model):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([grad.flatten() for grad in grads])


def collated(trainer, prompts, responses, everything):
    """Batch that the data collator of TRL creates from token ids."""
    rows = [{"input_ids": p + r} for p, r in zip(prompts, responses, strict=True)]
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        row["completion_mask"] = [int(everything)] * len(prompt) + [1] * len(response)
        row["labels"] = [t if m else -100 for t, m in zip(row["input_ids"], row["completion_mask"], strict=True)]
    return dict(trainer.data_collator(rows))


def split(prompts, responses, everything):
    """Demonstrations as ``DemonstrationsDataModule`` splits them."""
    if not everything:
        return prompts, responses
    return [p[:1] for p in prompts], [p[1:] + r for p, r in zip(prompts, responses, strict=True)]


def dtype_of(trainer):
    return str(trainer.model.dtype).removeprefix("torch.")


@pytest.mark.parametrize("pack_tokens", [None, 32, 64])
@pytest.mark.parametrize("everything", [False, True])
def test_loss_and_gradient_are_those_of_trl(trainer, tiny_model, everything, pack_tokens):
    prompts, responses = demonstrations()
    inputs = collated(trainer, prompts, responses, everything)
    assert int((inputs["labels"] != -100).sum()) == sum(SIZES) + everything * (sum(PROMPTS) + 2 * len(PROMPTS))
    theirs = with_gradient(trainer.compute_loss(trainer.model, inputs), trainer.model)
    own = ours(tiny_model, dtype_of(trainer), pack_tokens, *split(prompts, responses, everything))
    assert theirs[1].abs().max() > 1e-3
    torch.testing.assert_close(own[0], theirs[0], atol=1e-5, rtol=0, check_dtype=False)
    torch.testing.assert_close(own[1], theirs[1], atol=1e-5, rtol=0, check_dtype=False)


@pytest.mark.parametrize("pack_tokens", [None, 32])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_hugging_faces_labels_loss(tiny_model, dtype, everything, pack_tokens):
    from transformers import AutoModelForCausalLM

    prompts, responses = demonstrations(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype))
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids, labels = torch.zeros(len(prompts), width, dtype=torch.long), torch.full((len(prompts), width), -100)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, 0 if everything else len(prompt) : end] = ids[row, 0 if everything else len(prompt) : end]
    mask = torch.arange(width)[None] < torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses)])[:, None]
    theirs = with_gradient(model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss, model)
    own = ours(tiny_model, dtype, pack_tokens, *split(prompts, responses, everything))
    torch.testing.assert_close(own[0], theirs[0], atol=1e-5, rtol=0, check_dtype=False)
    torch.testing.assert_close(own[1], theirs[1], atol=1e-5, rtol=0, check_dtype=False)


def test_accumulated_micro_batches_weigh_tokens_as_trl_does(trainer, tiny_model):
    prompts, responses = demonstrations()
    dtype, tokens, halves = dtype_of(trainer), sum(SIZES), (slice(0, 3), slice(3, 6))
    theirs = torch.stack(
        [
            trainer.compute_loss(
                trainer.model, collated(trainer, prompts[half], responses[half], False), num_items_in_batch=tokens
            )
            for half in halves
        ]
    ).sum()
    policy = TextPolicy(LanguageModelConfig(name=tiny_model, dtype=dtype), PromptTemplate(), SamplingConfig())
    policy.configure()
    parts = [collate_demonstrations(prompts[half], responses[half], weight=1 / tokens) for half in halves]
    own = -sum((policy.evaluate(part).logprobs * part.advantages).sum() for part in parts)
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0, check_dtype=False)
