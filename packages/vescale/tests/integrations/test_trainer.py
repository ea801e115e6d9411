"""transformers' own Trainer under a plan, against the same script on one device."""

import contextlib
import os

import pytest
import torch

import vescale
from vescale_plans import library
from vescale_testkit import run_ranks, slice_of, warm_up

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
warm_up("vescale", "vescale.integrations.transformers", "transformers.models.llama.modeling_llama")

LOSS, PARAMETER = 1e-5, 1e-4  # the standard tolerances of docs/design.md, section 11
CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WIDTH = 16
PLANS = {
    "one": lambda: library.llama({"tp": 1}, sequence_parallel=False),
    "dp2": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=1),
    "dp2 zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, zero=3),
    "tp2": lambda: library.llama({"tp": 2}, sequence_parallel=True),
    "dp2 tp2 zero 3": lambda: library.llama({"dp": 2, "tp": 2}, sequence_parallel=False).override(zero=3),
}
RANKS = {"one": 1, "dp2": 2, "dp2 zero 3": 2, "tp2": 2, "dp2 tp2 zero 3": 4}


@contextlib.contextmanager
def torchrun():
    """The environment that torchrun gives a rank; accelerate's shared state is fresh."""
    from accelerate.state import AcceleratorState

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()} if world > 1 else {"OMP_NUM_THREADS": "1"})
    AcceleratorState._reset_state(True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def dataset(rows, seed=3):
    """Token lists of many lengths, of which the labels of some positions do not count."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        length = int(torch.randint(5, WIDTH, (1,), generator=generator))
        tokens = torch.randint(1, 61, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, tokens)
        made.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return made


class PadToLongest:
    """Of the batch, as collators of transformers do; each batch has another width."""

    def __call__(self, samples):
        width = max(len(sample["input_ids"]) for sample in samples)
        fill = {"input_ids": 0, "labels": -100}
        made = {n: torch.tensor([s[n] + [v] * (width - len(s[n])) for s in samples]) for n, v in fill.items()}
        return made | {"attention_mask": torch.tensor([[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"]))
                                                       for s in samples])}  # fmt: skip


def padded(rows):
    """All of one width, for the default collator."""
    fill = {"input_ids": 0, "labels": -100}
    return [{n: one[n] + [v] * (WIDTH - len(one[n])) for n, v in fill.items()} for one in dataset(rows)]


def script(folder, plan, resume=None, max_steps=10, model_init=False, **options):
    """A user's script; two lines are ours. Per step the logs, parameters, evaluation and the trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    from vescale.integrations.transformers import parallelize

    by_length = options.pop("by_length", True)
    arguments = {
        "per_device_train_batch_size": 6, "per_device_eval_batch_size": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    }  # fmt: skip
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, max_steps=max_steps, seed=1,
        save_strategy=options.pop("save_strategy", "no"), **{**arguments, **options},
    )  # fmt: skip
    set_seed(0)
    make = lambda: LlamaForCausalLM(LlamaConfig(**CONFIG, attention_dropout=0.1))
    data = {"data_collator": PadToLongest()} if by_length else {}
    rows = dataset if by_length else padded
    trainer = Trainer(
        model=None if model_init else make(), model_init=make if model_init else None, args=args,
        train_dataset=rows(40), eval_dataset=rows(11), **data,
    )  # fmt: skip
    if plan is not None:
        trainer = parallelize(PLANS[plan](), trainer)
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(rows(5))
    parameters = {
        name: (p.detach().full_tensor() if plan is not None else p.detach()).clone()
        for name, p in trainer.model.named_parameters()
    }
    return logs, parameters, evaluated, torch.from_numpy(predicted.predictions), predicted.metrics["test_loss"]


def compared(folder, plan, **options):
    with torchrun():
        found = script(f"{folder}/plan", plan, **options)
    with torchrun():
        os.environ.pop("LOCAL_RANK", None), os.environ.pop("RANK", None), os.environ.pop("WORLD_SIZE", None)
        wanted = script(f"{folder}/one{torch.distributed.get_rank()}", None, **options)
    return errors(found, wanted)


def errors(found, wanted):
    logs, parameters, evaluated, predictions, tested = found
    assert len(logs) == len(wanted[0]) > 0
    assert [one["learning_rate"] for one in logs] == [one["learning_rate"] for one in wanted[0]]
    return {
        "loss": max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(logs, wanted[0])),
        "norm": max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in zip(logs, wanted[0])),
        "parameter": max(((parameters[n] - p).norm() / p.norm()).item() for n, p in wanted[1].items()),
        "evaluation": abs(evaluated - wanted[2]) / wanted[2],
        "prediction": ((predictions - wanted[3]).norm() / wanted[3].norm()).item(),
        "test": abs(tested - wanted[4]) / wanted[4],
    }


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 5},
    "fixed width": {"by_length": False},
    "activation checkpointing": {"gradient_checkpointing": True},
    "model_init": {"model_init": True},
    "fused": {"optim": "adamw_torch_fused"},
    "smoothing": {"label_smoothing_factor": 0.1},
}
"""What a script asks of the Trainer."""
CASES = [(plan, option) for plan in PLANS for option in OPTIONS if plan != "one" or option == "plain"]


@pytest.mark.parametrize(("plan", "option"), slice_of(CASES, 12))
def test_trains_as_one_device(plan, option, tmp_path):
    for found in run_ranks(RANKS[plan], compared, str(tmp_path), plan, **OPTIONS[option], timeout=240):
        assert {n: e for n, e in found.items() if not e <= (PARAMETER if n == "parameter" else LOSS)} == {}


RESUMED = [("dp2 tp2 zero 3", "dp2"), ("dp2", "tp2"), ("tp2", "one"), ("one", "dp2 zero 3")]


def first_half(folder, plan, **options):
    with torchrun():
        script(folder, plan, max_steps=10, save_strategy="steps", save_steps=5, save_total_limit=2, **options)
    return sorted(os.listdir(folder))


def second_half(folder, plan, **options):
    """The rest of the training from the first checkpoint, against the whole of it on one device."""
    with torchrun():
        found = script(folder, plan, resume=f"{folder}/checkpoint-5", **options)
    with torchrun():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        wanted = script(f"{folder}/one{torch.distributed.get_rank()}", None, **options)
    return errors((found[0], *found[1:]), wanted)


@pytest.mark.parametrize(("first", "second"), slice_of(RESUMED, 2))
def test_resumes_under_another_mesh(first, second, tmp_path):
    for options in ({}, {"by_length": False}):
        folder = str(tmp_path / str(len(options)))
        written = run_ranks(RANKS[first], first_half, folder, first, timeout=240, **options)[0]
        assert written == ["checkpoint-10", "checkpoint-5"]
        for found in run_ranks(RANKS[second], second_half, folder, second, timeout=240, **options):
            assert {n: e for n, e in found.items() if not e <= (PARAMETER if n == "parameter" else LOSS)} == {}


def exported(folder, plan):
    """What `save_model` writes, as `from_pretrained` reads it, against the trainer's parameters."""
    from transformers import LlamaForCausalLM

    with torchrun():
        _, parameters, *_ = script(folder, plan, max_steps=2, save_strategy="steps", save_steps=2)
    again = LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-2")
    return all(torch.equal(p, parameters[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize("plan", ["dp2 zero 3", "tp2"])
def test_checkpoints_are_those_of_transformers(plan, tmp_path):
    assert all(run_ranks(RANKS[plan], exported, str(tmp_path), plan, timeout=120))


def logged_once(folder):
    with torchrun():
        from transformers import TrainerCallback

        class Counts(TrainerCallback):
            def __init__(self):
                self.first = 0

            def on_log(self, args, state, control, **kwargs):
                self.first += state.is_world_process_zero

        import transformers

        counts = Counts()
        kept = transformers.Trainer.__init__

        def with_counts(self, *args, **kwargs):
            kept(self, *args, callbacks=[counts], **kwargs)

        transformers.Trainer.__init__ = with_counts
        try:
            script(folder, "dp2", max_steps=2)
        finally:
            transformers.Trainer.__init__ = kept
    return counts.first > 0


def test_the_first_rank_alone_logs(tmp_path):
    assert run_ranks(2, logged_once, str(tmp_path), timeout=120) == [True, False]


def mixed(folder, plan):
    with torchrun():
        return [entry["loss"] for entry in script(folder, plan, bf16=True)[0]]


def test_bf16_trains_as_one_device_in_bf16(tmp_path):
    wanted = run_ranks(1, mixed, str(tmp_path), "one", timeout=120)[0]
    for found in run_ranks(2, mixed, str(tmp_path), "dp2 zero 3", timeout=120):
        assert max(abs(a - b) / b for a, b in zip(found, wanted)) <= 5e-3  # eight bits of mantissa


def no_optimizer(folder):
    with torchrun():
        script(folder, "dp2", max_steps=2, save_strategy="steps", save_steps=1)
    import shutil

    if torch.distributed.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint-1/vescale")
    torch.distributed.barrier()
    with torchrun(), pytest.raises(vescale.PlanError) as found:
        script(folder, "dp2", max_steps=2, resume=f"{folder}/checkpoint-1")
    return str(found.value)


def test_a_checkpoint_without_the_optimizer_is_refused(tmp_path):
    first, second = run_ranks(2, no_optimizer, str(tmp_path), timeout=120)
    assert first == second and "no optimizer state that veScale wrote" in first


def saved_by_the_first(folder):
    """A release of transformers that calls `_save` on the first rank alone."""
    import transformers
    from safetensors.torch import load_file

    def save_model(self, output_dir=None, _internal_call=False):
        if torch.distributed.get_rank() == 0:
            self._save(output_dir or self.args.output_dir)

    kept, transformers.Trainer.save_model = transformers.Trainer.save_model, save_model
    try:
        with torchrun():
            parameters = script(folder, "dp2 zero 3", max_steps=1, save_strategy="steps", save_steps=1)[1]
    finally:
        transformers.Trainer.save_model = kept
    saved = load_file(f"{folder}/checkpoint-1/model.safetensors")
    return {name: torch.equal(saved[name], value) for name, value in parameters.items()}


def test_saves_where_the_first_rank_alone_is_told_to(tmp_path):
    for same in run_ranks(2, saved_by_the_first, str(tmp_path), timeout=120):
        assert same and all(same.values())
