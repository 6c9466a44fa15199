"""A learner steps, is kept, comes back the same, and learns."""

import subprocess
import sys
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path

import pytest
import torch
from atropos.contracts.training import OptimConfig, SampleGroup, SampleSegment
from atropos.inference.engine import weights
from atropos.trainer.learner import Learner
from atropos.trainer.problem import TrainerProblem
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .batches import group_of, random_groups, segment_of, tiny_folder, trainer_config


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def sampled_by(learner: Learner, seed: int, temperature: float = 1.0) -> list[SampleGroup]:
    """Groups whose behaviour policy is the learner as it is."""
    return random_groups(seed, logprobs=lambda ids: learner.logprobs([ids], temperature)[0], temperature=temperature)


def test_the_first_step_on_policy_has_no_loss_and_a_gradient(initial: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(), seed=0)

    def sampled(number: int, member: int) -> SampleSegment:
        return segment_of([5, number, member, 7], [0, 0, 1, 1], lambda ids: learner.logprobs([ids])[0])

    same_length = [group_of(n, [1.0, 0.0, 1.0], [sampled(n, member) for member in range(3)]) for n in range(4)]
    outcome = learner.step(same_length)
    metrics = outcome.metrics
    assert outcome.version == learner.version == 1
    assert metrics["loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] > 1e-2
    assert metrics["clip_fraction"] == 0
    assert metrics["k3"] == pytest.approx(0, abs=1e-6)
    assert metrics["max_ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["mean_abs_logprob_difference"] == pytest.approx(0, abs=1e-5)
    assert 0 < metrics["entropy"] < 3.2
    assert (metrics["tokens"], metrics["episodes"], metrics["groups"], metrics["segments"]) == (24, 12, 4, 12)
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert all(isinstance(value, float) and isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_on_policy_means_at_the_temperature_of_each_token(initial: Path, temperature: float) -> None:
    learner = Learner.fresh(initial, trainer_config(lr=0), seed=0)
    hot, plain = sampled_by(learner, 1, temperature), sampled_by(learner, 2)
    mixed = [hot[0], replace(plain[0], group_no=7)]
    assert learner.step(mixed).metrics["k3"] == pytest.approx(0, abs=1e-6)
    assert learner.step([as_if_at_temperature_1(one) for one in hot]).metrics["k3"] > 1e-3


def as_if_at_temperature_1(group: SampleGroup) -> SampleGroup:
    episodes = (
        replace(episode, segments=tuple(replace(part, temperatures=[1.0] * len(part.ids)) for part in episode.segments))
        for episode in group.episodes
    )
    return replace(group, episodes=tuple(episodes))


def test_the_learning_rate_grows_to_its_value(initial: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(lr=0.01, warmup=4), seed=0)
    rates = [learner.step(random_groups(step)).metrics["lr"] for step in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_a_linear_decay_leaves_a_twentieth(initial: Path) -> None:
    optim = OptimConfig(lr=0.01, warmup=0, decay="linear")
    config = trainer_config().model_copy(update={"steps": 4, "optim": optim})
    learner = Learner.fresh(initial, config, seed=0)
    rates = [learner.step(random_groups(step)).metrics["lr"] for step in range(5)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0005])


def test_progress_is_told_after_each_micro_batch(initial: Path) -> None:
    told: list[float] = []
    Learner.fresh(initial, trainer_config(micro_batch_tokens=30), seed=0).step(random_groups(0), told.append)
    assert len(told) > 3
    assert told == sorted(told)
    assert told[-1] == 1


def test_a_learning_rate_of_0_changes_no_bit(initial: Path, tmp_path: Path) -> None:
    """Not even of values that arithmetic would tidy up."""
    model = AutoModelForCausalLM.from_pretrained(str(initial))
    with torch.no_grad():
        model.lm_head.weight[0, :2] = torch.tensor([-0.0, 1e-42])
    model.save_pretrained(str(tmp_path / "odd"))
    learner = Learner.fresh(tmp_path / "odd", trainer_config(lr=0), seed=0)
    before = learner.checksums()
    for step in range(3):
        assert learner.step(random_groups(step)).metrics["grad_norm"] > 0
    assert learner.checksums() == before
    assert learner.version == 3


def test_identical_input_gives_identical_weights(initial: Path) -> None:
    def trained(threads: int) -> dict[str, str]:
        learner = Learner.fresh(initial, trainer_config(), seed=0, threads=threads)
        for step in range(3):
            learner.step(random_groups(step))
        return learner.checksums()

    first = trained(1)
    assert trained(1) == first
    assert trained(2) == trained(2)
    assert first != Learner.fresh(initial, trainer_config(), seed=0).checksums()


def test_the_order_in_which_groups_come_does_not_matter(initial: Path) -> None:
    one, other = (Learner.fresh(initial, trainer_config(), seed=0) for _ in range(2))
    one.step(random_groups(3))
    other.step(random_groups(3)[::-1])
    assert one.checksums() == other.checksums()


def test_a_step_leaves_the_process_as_it_was(initial: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(), seed=0, threads=1)
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    learner.step(random_groups(0))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert float(torch.tensor(1e-42) * 1) > 0


# --- kept and restored ----------------------------------------------------------------------------------------------


def test_a_restored_learner_continues_bit_for_bit(initial: Path, tmp_path: Path) -> None:
    config = trainer_config(warmup=3)
    whole = Learner.fresh(initial, config, seed=4)
    whole.step(random_groups(1))
    digest = whole.save(tmp_path / "step-1")
    whole.step(random_groups(2))

    again = Learner.restore(tmp_path / "step-1", config)
    assert (again.version, again.digest) == (1, digest)
    again.step(random_groups(2))
    assert again.checksums() == whole.checksums()
    assert again.save(tmp_path / "one") == whole.save(tmp_path / "other")  # optimiser and random state too

    code = (
        "import sys, json; from pathlib import Path\n"
        "from atropos.trainer.learner import Learner\n"
        "from atropos.tests.trainer.batches import random_groups, trainer_config\n"
        "learner = Learner.restore(Path(sys.argv[1]), trainer_config(warmup=3)); learner.step(random_groups(2))\n"
        "print(learner.save(Path(sys.argv[2])))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "step-1"), str(tmp_path / "third")], capture_output=True, text=True
    )
    assert ran.stdout.split() == [whole.digest], ran.stderr


def test_what_a_step_draws_continues_from_the_learner_s_own_state(initial: Path, tmp_path: Path) -> None:
    """As a layer with dropout would. Two learners differ by their seed alone."""

    def drawn(learner: Learner) -> list[float]:
        out: list[float] = []
        learner.step(random_groups(0), lambda share: out.append(float(torch.rand(1))))
        return out

    learner, twin, other = (Learner.fresh(initial, trainer_config(), seed=seed) for seed in (0, 0, 1))
    first = drawn(learner)
    assert drawn(twin) == first
    assert drawn(other) != first
    learner.save(tmp_path / "1")
    second = drawn(learner)
    assert second != first
    assert drawn(Learner.restore(tmp_path / "1", trainer_config())) == second


def test_a_model_of_half_precision_is_trained_and_kept_in_single(initial: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(str(initial), dtype=torch.bfloat16).save_pretrained(str(tmp_path / "half"))
    learner = Learner.fresh(tmp_path / "half", trainer_config(lr=1e-6), seed=0)
    before = learner.checksums()
    learner.step(random_groups(0))
    assert all(value != before[name] for name, value in learner.checksums().items() if "layers" in name)
    learner.save(tmp_path / "1")
    assert AutoModelForCausalLM.from_pretrained(str(tmp_path / "1"), dtype="auto").dtype == torch.float32


def test_the_digest_names_the_checkpoint_that_memory_equals(initial: Path, tmp_path: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(), seed=0)
    assert learner.digest is None
    first = learner.save(tmp_path / "0")
    assert learner.digest == first
    assert learner.save(tmp_path / "0") == first
    learner.step(random_groups(0))
    assert learner.digest is None
    with pytest.raises(TrainerProblem, match="already holds another"):
        learner.save(tmp_path / "0")
    assert learner.digest is None
    assert learner.save(tmp_path / "1") != first


def test_a_torn_checkpoint_is_not_restored(initial: Path, tmp_path: Path) -> None:
    Learner.fresh(initial, trainer_config(), seed=0).save(tmp_path / "0")
    file = tmp_path / "0" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(TrainerProblem, match=r"model\.safetensors has changed"):
        Learner.restore(tmp_path / "0", trainer_config())


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_loads_the_checkpoint_and_holds_the_same_weights(tmp_path: Path, tied: bool) -> None:
    initial = tiny_folder(tmp_path / "tiny", tied=tied)
    learner = Learner.fresh(initial, trainer_config(), seed=0)
    engine = AutoModelForCausalLM.from_pretrained(str(initial))
    learner.step(random_groups(0))
    learner.save(tmp_path / "1")
    weights.replace(engine, weights.read(tmp_path / "1", engine))
    assert weights.checksums(engine) == {f"{weights.RANK}:{k}": v for k, v in learner.checksums().items()}
    assert Learner.restore(tmp_path / "1", trainer_config()).checksums() == learner.checksums()


def test_small_files_of_the_model_travel_along_even_when_their_folder_goes(initial: Path, tmp_path: Path) -> None:
    first = Learner.fresh(initial, trainer_config(), seed=0)
    first.save(tmp_path / "0")
    later = Learner.restore(tmp_path / "0", trainer_config())
    (tmp_path / "0").rename(tmp_path / "gone")
    later.step(random_groups(0))
    later.save(tmp_path / "1")
    for name in ("tokenizer.json", "renderer.json", "generation_config.json"):
        assert (tmp_path / "1" / name).read_bytes() == (initial / name).read_bytes()


# --- what cannot be trained -----------------------------------------------------------------------------------------


def broken(**changes: object) -> list[SampleGroup]:
    good = segment_of([5, 6, 7], [0, 1, 1])
    return [group_of(3, [0.0, 1.0], [good, replace(good, **changes)])]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([], "no token to train on"),
        ([group_of(0, [None, None], [segment_of([5, 6], [0, 1])] * 2)], "no token to train on"),
        (broken(ids=[5, 6]), "member 1 in group 3 .toy. has lists of different lengths"),
        (broken(mask=[1, 1, 1]), "trains its first token"),
        (broken(temperatures=[0.0, 1.0, 0.0]), "sampled at temperature 0.0"),
        (broken(logprobs=[0.0, -1.0, nan]), "with logprob nan"),
        (broken(ids=[5, 6, 24]), "token 24 is not one of the model's 24"),
    ],
)
def test_a_batch_that_cannot_train_is_refused_and_changes_nothing(
    initial: Path, tmp_path: Path, batch: list[SampleGroup], reason: str
) -> None:
    learner = Learner.fresh(initial, trainer_config(), seed=0)
    digest = learner.save(tmp_path / "0")
    with pytest.raises(TrainerProblem, match=reason):
        learner.step(batch)
    assert (learner.version, learner.digest) == (0, digest)
    assert learner.save(tmp_path / "0") == digest


def test_a_gradient_that_is_not_finite_changes_nothing(initial: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(initial))
    with torch.no_grad():
        model.lm_head.weight[3] = nan
    model.save_pretrained(str(tmp_path / "odd"))
    learner = Learner.fresh(tmp_path / "odd", trainer_config(), seed=0)
    digest = learner.save(tmp_path / "0")
    with pytest.raises(TrainerProblem, match="not finite; no weight was changed"):
        learner.step(random_groups(0))
    assert (learner.version, learner.digest) == (0, digest)
    assert learner.save(tmp_path / "0") == digest


def test_a_step_broken_off_on_its_way_changes_nothing(initial: Path, tmp_path: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(micro_batch_tokens=30), seed=0)
    digest = learner.save(tmp_path / "0")

    def stops(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.step(random_groups(0), stops)
    assert (learner.version, learner.digest) == (0, digest)
    assert learner.save(tmp_path / "0") == digest
    other = Learner.restore(tmp_path / "0", trainer_config(micro_batch_tokens=30))
    for one in (learner, other):  # nor is half a gradient left for the next
        one.step(random_groups(1))
    assert learner.checksums() == other.checksums()


def test_a_folder_that_is_no_model_is_refused_in_a_sentence(initial: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerProblem, match=r"holds no config\.json"):
        Learner.fresh(tmp_path / "nowhere", trainer_config(), seed=0)
    for file in initial.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(TrainerProblem, match="cannot be loaded as a model"):
        Learner.fresh(tmp_path, trainer_config(), seed=0)


def test_weights_that_are_missing_are_not_made_up(initial: Path, tmp_path: Path) -> None:
    for file in initial.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(initial / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainerProblem, match=r"lacks weights of its model: model\.norm\.weight"):
        Learner.fresh(tmp_path, trainer_config(), seed=0)


def test_without_torch_a_learner_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from atropos.trainer.learner import Learner, TrainerProblem\n"
        "from atropos.contracts.training import TrainerConfig\n"
        "try: Learner.fresh(Path('x'), TrainerConfig(), 0)\n"
        "except TrainerProblem as problem: print(problem)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == 'training needs torch, which is not installed; run: pip install "atropos-durable[train]"\n'


# --- probes and learning --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_a_plain_forward_pass(initial: Path) -> None:
    learner = Learner.fresh(initial, trainer_config(micro_batch_tokens=12), seed=0)
    model = AutoModelForCausalLM.from_pretrained(str(initial)).eval()
    sequences = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9, 10], [2, 2], [9, 8, 7]]
    for ids, found in zip(sequences, learner.logprobs(sequences, temperature=0.7), strict=True):
        with torch.no_grad():
            expected = (
                torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / 0.7, -1)
                .gather(1, torch.tensor(ids)[1:, None])[:, 0]
                .tolist()
                if len(ids) > 1
                else []
            )
        assert found == pytest.approx(expected, abs=1e-5)


def test_what_is_rewarded_becomes_likely(initial: Path) -> None:
    """Told 5, say 9: twenty steps of eight samples each, drawn from the policy as it is."""
    learner = Learner.fresh(initial, trainer_config(lr=3e-2), seed=0)
    generator = torch.Generator().manual_seed(0)

    def chances() -> list[float]:
        return [value for (value,) in learner.logprobs([[5, token] for token in range(24)])]

    def sample(token: int) -> SampleSegment:
        return segment_of([5, token], [0, 1], lambda ids: [now[ids[1]]])

    first = now = chances()
    for step in range(20):
        drawn = torch.multinomial(torch.tensor(now).exp(), 6, replacement=True, generator=generator).tolist()
        said = [9, *drawn, 8]
        learner.step([group_of(step, [float(token == 9) for token in said], [sample(token) for token in said])])
        now = chances()
    assert first[9] < -1.5
    assert now[9] > -0.1
