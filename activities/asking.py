"""The model call of engines that take messages: one stored answer for each (episode, attempt, turn).

Invariant: the bytes of the answer are in the store before this activity returns, and a retry that finds them pays
nothing. No token is made up: such a turn has none, only the provider's own count, and is never trained on.
"""

from temporalio import activity

from ..contracts.messages import Message
from ..contracts.records import EpisodeFacts, TurnRecord
from ..db.turns import load_answers, save_turn
from ..environments.loaded import LoadedEnvironment
from ..inference.engines import Answer, AskRequest, ContextOverflow, Said
from ..inference.errors import EngineFailure
from .failures import engine_failure
from .patience import patiently
from .prompts import answers, token_budget
from .services import Services


async def ask_turn(
    services: Services, facts: EpisodeFacts, environment: LoadedEnvironment, turn: int
) -> TurnRecord | None:
    """One answer from an engine of the run, stored; None where the conversation does not fit the model's context.

    Raises what Temporal should do about a failure.
    """
    run = await services.run(facts.key.run_id)
    sampling = run.config.sampling_for(facts.evaluation)
    budget = token_budget(run.config, facts, environment, known_prompt(facts))
    if budget <= 0:
        return None
    request = AskRequest(
        request_id=f"{facts.key.workflow_id}/turn/{turn}/try/{activity.info().attempt}",
        conversation=conversation(facts, await load_answers(services.store, facts.key) if facts.turns else {}),
        tools=tuple(environment.spec.tool_specs()),
        sampling=sampling,
        max_tokens=budget,
        turn=turn,
        model=run.config.model.path,
    )
    pool = await services.message_engines(facts.key.run_id)
    try:
        async with pool.lease(facts.key.workflow_id) as engine:
            answer = await engine.ask(request)
    except ContextOverflow:
        return None
    except EngineFailure as failure:
        raise engine_failure(failure) from failure
    record = _record(request, answer, engine.engine_id)
    stored, _ = await patiently(save_turn, services.store, facts.key, record, answer=answer.raw)
    return stored


def known_prompt(facts: EpisodeFacts) -> int:
    """Tokens that the next prompt has at least, as far as the provider counts them."""
    last = facts.turns[-1] if facts.turns else None
    return 0 if last is None else (last.told_prompt or 0) + (last.told_sampled or 0)


def conversation(facts: EpisodeFacts, raw: dict[int, bytes]) -> tuple[Said, ...]:
    """All that was said, and of each answer the bytes it came in. `raw`: those, by turn."""
    said = [Said(message) for message in facts.prompt]
    for turn in facts.turns:
        said.append(Said(turn.message, raw.get(turn.turn)))
        said += map(Said, answers(facts, turn.turn))
    return tuple(said)


def _record(request: AskRequest, answer: Answer, engine_id: str) -> TurnRecord:
    message: Message = answer.message
    return TurnRecord(
        turn=request.turn,
        segment=0,
        opens_segment=request.turn == 0,
        message=message,
        prompt_delta=[],
        sampled=[],
        logprobs=[],
        mask=[],
        finish=answer.finish,
        spans=(),
        temperature=request.sampling.temperature,
        engine_id=engine_id,
        incarnation=answer.model or request.model,
        request_id=request.request_id,
        told_prompt=answer.usage_prompt,
        told_sampled=answer.usage_sampled,
    )
