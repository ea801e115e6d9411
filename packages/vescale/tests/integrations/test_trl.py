"""TRL's own trainers under a plan, unmodified, against the same script on one device."""

import contextlib
import inspect
import os

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("trl", reason="these tests are of TRL")
pytest.importorskip("datasets", reason="TRL's trainers read datasets")
warm_up("vescale", "vescale.integrations.transformers", "transformers.models.llama.modeling_llama", "trl", "datasets")

LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
WORDS = [f"w{at}" for at in range(56)]
CONFIG = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PLANS = {
    "one": lambda: library.llama({"tp": 1}, sequence_parallel=False),
    "dp2": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1),
    "dp2 zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp2": lambda: library.llama({"tp": 2}, sequence_parallel=False),
    "dp2 tp2 zero 3": lambda: library.llama({"dp": 2, "tp": 2}, sequence_parallel=False).override(zero=3),
}
RANKS = {"one": 1, "dp2": 2, "dp2 zero 3": 2, "tp2": 2, "dp2 tp2 zero 3": 4}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@contextlib.contextmanager
def process(plan):
    """The environment of a rank of torchrun under a plan, or of one process; accelerate's shared state is fresh."""
    from accelerate.state import AcceleratorState

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    kept = {name: os.environ.pop(name, None) for name in (*names, "OMP_NUM_THREADS")}
    os.environ.update({name: str(value) for name, value in names.items()} if plan and world > 1 else {})
    os.environ["OMP_NUM_THREADS"] = "1"
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def texts(rows, low, high, seed):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high, shape: torch.randint(low, high, shape, generator=generator)
    return ["".join(f"{WORDS[at]} " for at in draw(0, len(WORDS), (int(draw(low, high, (1,))),))) for _ in range(rows)]


def model(folder):
    """As it is loaded from a folder: so that reference models are found there, too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(f"{folder}/../base")  # transformers: the first rank writes
    torch.distributed.barrier()
    return LlamaForCausalLM.from_pretrained(f"{folder}/../base")


COMMON = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "seed": 1, "learning_rate": 1e-2,
    "bf16": False, "activation_checkpointing": False, "max_grad_norm": 0.5, "save_strategy": "no",
}  # fmt: skip


def made(kind, folder, options):
    """A user's script up to the trainer."""
    import datasets
    import trl

    args = {"output_dir": folder, **COMMON, **options}
    if "activation_checkpointing" not in inspect.signature(trl.SFTConfig).parameters:  # transformers called it so later
        args["gradient_checkpointing"] = args.pop("activation_checkpointing")
    lora = {}
    if args.pop("lora", False):
        from peft import LoraConfig

        lora = {"peft_config": LoraConfig(**LORA)}
    if kind == "sft":
        prompted = args.pop("prompted", False)
        rows = {"text": texts(40, 4, 14, 3)}
        if prompted:
            rows = {"prompt": texts(40, 2, 6, 3), "completion": texts(40, 2, 8, 4)}
        args = trl.SFTConfig(**{"per_device_train_batch_size": 6, "max_length": 16, **args})
        return trl.SFTTrainer(
            model(folder), args, train_dataset=datasets.Dataset.from_dict(rows),
            eval_dataset=datasets.Dataset.from_dict({name: some[:11] for name, some in rows.items()}),
            processing_class=tokenizer(), **lora,
        )  # fmt: skip
    if kind == "dpo":
        rows = {"prompt": texts(24, 2, 6, 3), "chosen": texts(24, 2, 8, 4), "rejected": texts(24, 2, 8, 5)}
        args = trl.DPOConfig(**{"per_device_train_batch_size": 4, "max_length": 16, **args})
        return trl.DPOTrainer(
            model(folder), args=args, processing_class=tokenizer(), train_dataset=datasets.Dataset.from_dict(rows),
            **lora,
        )  # fmt: skip
    length = lambda completions, **_: [float(len(one.split())) - 3 + len(set(one.split())) for one in completions]
    args = trl.GRPOConfig(
        **{
            "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "use_vllm": False,
            **args,
        }
    )  # fmt: skip
    return trl.GRPOTrainer(
        model(folder), reward_funcs=length, args=args, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts(24, 2, 6, 3)}), **lora,
    )  # fmt: skip


def script(kind, folder, plan, resume=None, max_steps=10, **options):
    from vescale.integrations.peft import adapted
    from vescale.integrations.transformers import parallelize

    with process(plan):
        trainer = made(kind, folder, {"max_steps": max_steps, **options})
        if plan is not None:
            chosen = PLANS[plan]()
            trainer = parallelize(adapted(chosen, trainer.model) if options.get("lora") else chosen, trainer)
        trainer.train(resume_from_checkpoint=resume)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        parameters = {
            name: getattr(p.detach(), "full_tensor", p.detach)().clone()
            for name, p in trainer.model.named_parameters()
        }
    return logs, parameters


UNTOLD = ("step_time", "runtime", "per_second")


def compared(kind, folder, plan, **options):
    found = script(kind, f"{folder}/plan", plan, **options)
    wanted = script(kind, f"{folder}/one{torch.distributed.get_rank()}", None, **options)
    return errors(found, wanted)


def errors(found, wanted):
    """The largest difference of each number that is logged, and of the parameters."""
    assert len(found[0]) == len(wanted[0]) > 0
    apart = {"parameter": max(((found[1][n] - p).norm() / p.norm()).item() for n, p in wanted[1].items())}
    for one, other in zip(found[0], wanted[0]):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if not any(part in name for part in UNTOLD):
                least = 1.0 if name == "loss" and "reward" in other else 1e-3  # advantages of size one that cancel
                apart[name] = max(apart.get(name, 0.0), abs(one[name] - value) / max(abs(value), least))
    return apart


SCRIPTS = {
    "sft": ("sft", {}),
    "sft, accumulation": ("sft", {"gradient_accumulation_steps": 2, "max_steps": 5}),
    "sft, completions alone": ("sft", {"prompted": True}),
    "sft, packed": ("sft", {"packing": True, "packing_strategy": "wrapped"}),
    "sft, activation checkpointing": ("sft", {"activation_checkpointing": True}),
    "sft, lora": ("sft", {"lora": True}),
    "grpo": ("grpo", {}),
    "grpo, against a reference": ("grpo", {"beta": 0.04}),
    "grpo, lora": ("grpo", {"lora": True}),
    "dpo": ("dpo", {}),
}
CASES = [(plan, script) for script in SCRIPTS for plan in PLANS if plan != "one"]


SMALL = ("logits/", "rewards/", "logps/", "kl", "clip_ratio")
"""Differences of numbers that are nearly equal, or shares of how often one is the larger: rounding decides."""


def within(apart):
    """What is not one device's; counts and rates are to the last digits of a float."""
    told = {name: one for name, one in apart.items() if not any(part in name for part in SMALL)}
    return {name: one for name, one in told.items() if not one <= (PARAMETER if name == "parameter" else 10 * LOSS)}


@pytest.mark.parametrize(("plan", "script"), slice_of(CASES, 4))
def test_trains_as_one_device(plan, script, tmp_path):
    kind, options = SCRIPTS[script]
    for apart in run_ranks(RANKS[plan], compared, kind, str(tmp_path), plan, timeout=300, **options):
        assert apart["loss"] <= LOSS and within(apart) == {}


RESUMED = [
    ("sft", "dp2 tp2 zero 3", "tp2"),
    ("sft", "tp2", "one"),
    ("grpo", "tp2", "dp2"),
    ("grpo", "one", "dp2 zero 3"),
]


def first_half(kind, folder, plan):
    script(kind, folder, plan, save_strategy="steps", save_steps=5)


def second_half(kind, folder, plan):
    """The rest of the training from the first checkpoint, against the whole of it on one device."""
    found = script(kind, folder, plan, resume=f"{folder}/checkpoint-5")
    wanted = script(kind, f"{folder}/../one{torch.distributed.get_rank()}", None)
    return errors(found, wanted)


@pytest.mark.parametrize(("kind", "first", "second"), slice_of(RESUMED, 2))
def test_resumes_under_another_mesh(kind, first, second, tmp_path):
    folder = str(tmp_path / "run")
    run_ranks(RANKS[first], first_half, kind, folder, first, timeout=300)
    for apart in run_ranks(RANKS[second], second_half, kind, folder, second, timeout=300):
        assert apart["loss"] <= LOSS and apart["parameter"] <= PARAMETER and apart["grad_norm"] <= 10 * LOSS
