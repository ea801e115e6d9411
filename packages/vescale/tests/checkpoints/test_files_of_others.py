"""What others write of a model's tensors: full tensors to the bit, or an error that names the line that does it."""

import contextlib
import copy
import io
import pickle

import pytest
import torch

import vescale
from vescale_dtensor import VescaleError
from vescale_plans import library
from vescale_testkit import in_turns, run_ranks, warm_up

warm_up("vescale", "transformers.models.llama.modeling_llama", "safetensors.torch")

CONFIG = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
PLANS = {
    "tp": lambda: library.llama({"tp": 2}, sequence_parallel=False),
    "zero 2": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp", zero=2),
    "zero 3": lambda: vescale.Plan(mesh={"dp": 2}, parameters={"*": {}}, data_axis="dp", zero=3),
}


def _models(plan, tied):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=tied))
    parallel, _ = vescale.parallelize(PLANS[plan](), copy.deepcopy(model), torch.optim.AdamW)
    return model, parallel


def _equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert type(tensor) is torch.Tensor and torch.equal(tensor, expected[name].detach()), name


def _written(plan, tied, folder):
    """Every format: right by itself, or refused with `full_tensor()`, with which it is right."""
    import safetensors.torch as safetensors

    model, parallel = _models(plan, tied)
    expected = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state = parallel.state_dict()
    full = {name: tensor.full_tensor().contiguous() for name, tensor in state.items()}
    rank = torch.distributed.get_rank()
    refusals = []

    @contextlib.contextmanager
    def may_refuse(what):
        try:
            yield
        except VescaleError as error:
            assert "full_tensor()" in str(error), error
            refusals.append(what)

    untied = {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    with may_refuse("safetensors"):  # which refuses two names of one tensor by itself
        _equal(safetensors.load(safetensors.save(untied)), {name: expected[name] for name in untied})
    with may_refuse("save_file"):
        safetensors.save_file(untied, f"{folder}/{rank}.safetensors")
        _equal(safetensors.load_file(f"{folder}/{rank}.safetensors"), {name: expected[name] for name in untied})
    with may_refuse("save_pretrained"):
        parallel.save_pretrained(f"{folder}/saved")
        if rank == 0:  # transformers writes on the first rank alone
            found = safetensors.load_file(f"{folder}/saved/model.safetensors")  # a tie is written once
            _equal(found, {name: expected[name] for name in untied})
    with may_refuse("torch.save"):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        _equal(torch.load(file), expected)
    for name, tensor in state.items():
        with may_refuse(f"pickle {name}"):
            assert torch.equal(pickle.loads(pickle.dumps(tensor)), expected[name])
        assert torch.equal(copy.deepcopy(tensor).full_tensor(), expected[name])
        assert torch.equal(torch.from_numpy(tensor.numpy().copy()), expected[name])
        assert torch.equal(torch.from_dlpack(tensor), expected[name])
    for name, parameter in parallel.named_parameters():
        assert torch.equal(copy.deepcopy(parameter.detach()).full_tensor(), expected[name])
    if not tied:
        _equal(safetensors.load(safetensors.save(full)), expected)
    parallel.save_pretrained(f"{folder}/full", state_dict=full)
    if rank == 0:
        again = type(model).from_pretrained(f"{folder}/full").state_dict()
        _equal({name: tensor.detach() for name, tensor in again.items()}, expected)
    return [what for what in refusals if what != "save_pretrained"], "save_pretrained" in refusals


@in_turns(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_full_tensors_or_an_error_that_says_how(plan, tied, tmp_path):
    first, second = run_ranks(2, _written, plan, tied, str(tmp_path), timeout=120)
    assert first[0] == second[0] and (bool(first[0]) or plan == "zero 2")
