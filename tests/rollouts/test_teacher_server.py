"""A teacher behind our inference server: the gradients of the same teacher in this process; trouble is named."""

import copy

import pytest
import torch

from engine_policies import llama, loaded
from faulty_servers import move
from kl_comedy.config.schema import TeacherConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.kl.estimators import TOP_K_FORMS
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from kl_comedy.rollouts.engines.teacher import TeacherServer
from passes import token_pass

OPTIONS = {"temperature": 1.0, "chunk_elements": 10**6}
TERMS = [
    KLTerm("k1", credit="own"),
    KLTerm("k3", placement="loss", weight="policy"),
    *(KLTerm("top_k", placement="loss", options={"k": 3, "tokens": "reference", "form": form}) for form in TOP_K_FORMS),
    KLTerm("top_k", placement="loss", options={"k": 1, "tokens": "reference"}),
]


@pytest.fixture
def teacher(policy):
    """A model of the policy's shape, some way from it."""
    other = copy.deepcopy(policy)
    torch.manual_seed(1)
    move(other.model, size=0.5)
    return other


def batch():
    """Two prompts, left-padded; completions of four, two and one token, right-padded."""
    generator = torch.Generator().manual_seed(3)
    prompt_ids_BP, ids_BT = (torch.randint(2, 14, (3, width), generator=generator) for width in (3, 4))
    prompt_mask_BP = torch.tensor([[True, True, True], [False, True, True], [False, True, True]])
    mask_BT = torch.arange(4)[None] < torch.tensor([4, 2, 1])[:, None]
    return {"prompt_ids_BP": prompt_ids_BP, "prompt_mask_BP": prompt_mask_BP, "ids_BT": ids_BT, "mask_BT": mask_BT}


def gradient(policy, reference, term):
    """Of the term's surrogate in the policy's parameters, as training computes it."""
    inputs, before = batch(), torch.full((3, 4), -2.0)
    passed = reference.forward_pass(**inputs)
    tops = [] if term.top is None else [term.top]
    scored = token_pass(
        policy.model, **inputs, **OPTIONS, reference=passed, top=tops, certainty=term.weight == "policy"
    )
    surrogate_BT = kl_surrogate(
        term,
        logp_BT=scored.logp_BT,
        ref_logp_BT=passed.logp_BT,
        behaviour_logp_BT=torch.where(inputs["mask_BT"], before, 0.0),
        mask_BT=inputs["mask_BT"],
        top=None if term.top is None else scored.top[term.top],
        certainty_BT=scored.certainty_BT,
    )
    gradients = torch.autograd.grad(surrogate_BT.sum(), [p for p in policy.model.parameters() if p.requires_grad])
    return torch.cat([each.flatten() for each in gradients])


def served(server, policy, k=3, **settings):
    return TeacherServer(TeacherConfig(url=server.url, **settings), policy, k)


def test_the_gradients_are_those_of_the_teacher_in_this_process(policy, teacher, serve):
    local = Reference(teacher.model, PassOptions(**OPTIONS))
    remote = served(serve(teacher), policy)
    for term in TERMS:
        ours, theirs = gradient(policy, remote, term), gradient(policy, local, term)
        assert float(theirs.norm()) > 1e-3
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4, msg=lambda text, t=term: f"{t.label()}: {text}")


def test_only_the_likeliest_tokens_are_known(policy, teacher, serve):
    passed = served(serve(teacher), policy).forward_pass(**batch())
    whole = Reference(teacher.model, PassOptions(**OPTIONS)).forward_pass(**batch())
    torch.testing.assert_close(passed.logp_BT, whole.logp_BT, atol=1e-5, rtol=1e-5)
    assert [tuple(each.shape) for each in passed.top] == [(7, 3)] * 2 and passed.hidden_NH is None
    for more, says in (
        ({"kl": True}, "not of the vocabulary"),
        ({"top": [(4, "reference")]}, "only its 3 likeliest"),
        ({"top": [(3, "policy")]}, "only its 3 likeliest"),
    ):
        with pytest.raises(ValueError, match=says):
            token_pass(policy.model, **batch(), **OPTIONS, reference=passed, **more)


def test_the_server_may_fail_twice(policy, teacher, serve):
    server = serve(teacher)
    remote = served(server, policy)
    expected = remote.forward_pass(**batch()).logp_BT
    server.faults[:] = ["500", "drop"]
    assert torch.equal(remote.forward_pass(**batch()).logp_BT, expected)
    server.faults[:] = ["500"] * 9
    with pytest.raises(RunFailed, match=r"^reference\.teacher\.url: http.*answered 500"):
        remote.forward_pass(**batch())


def test_a_server_that_cannot_be_the_teacher_is_refused(policy, teacher, serve, monkeypatch):
    server = serve(teacher)
    assert (
        served(server, policy).hash
        == served(server, policy).hash
        != served(server, policy, options={"server_model": "a"}).hash
    )
    monkeypatch.setenv("OTHER_KEY", "wrong")
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*environment variable OTHER_KEY"):
        served(server, policy, options={"api_key_env": "OTHER_KEY"})
    server.answers["/v1/models"] = (404, {})
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*404"):
        served(server, policy)
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*ConnectError"):
        TeacherServer(TeacherConfig(url="http://127.0.0.1:1"), policy, 0)


def test_a_token_that_is_none_of_the_policys_ends_the_run(policy, serve):
    wide = llama(tied=True)
    wide.resize_token_embeddings(wide.config.vocab_size + 8, mean_resizing=False)
    with torch.no_grad():
        wide.get_input_embeddings().weight[-8:] = 50.0 * wide.get_input_embeddings().weight[:8]
    with pytest.raises(RunFailed, match="none of the policy's"):
        served(serve(loaded(wide)), policy).forward_pass(**batch())


@pytest.mark.parametrize("url", ["ftp://host", "http://user:key@host", "host:8000", "http://host:99999"])
def test_addresses_are_checked(url):
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*without user or key"):
        TeacherConfig(url=url)
