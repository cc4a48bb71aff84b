"""A teacher behind our inference server: the gradients of the same teacher in this process; trouble is named."""

import copy

import pytest
import torch

from engine_policies import llama, loaded
from faulty_servers import move
from kl_comedy.config.schema import TeacherConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.kl.estimators import TOP_K_FORMS, TopRequest
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from kl_comedy.rollouts.engines.teacher import TeacherServer
from passes import token_pass

OPTIONS = {"temperature": 1.0, "chunk_elements": 10**6}


def top_k(k, **options):
    return KLTerm("top_k", placement="loss", options={"k": k, "tokens": "reference", **options})


TERMS = [KLTerm("k1", credit="own"), KLTerm("k3", placement="loss", weight="policy"), top_k(1)]
TERMS.extend(top_k(3, form=form) for form in TOP_K_FORMS)


@pytest.fixture
def teacher(policy):
    """A model of the policy's shape, some way from it."""
    other = copy.deepcopy(policy)
    torch.manual_seed(1)
    move(other.model, size=0.5)
    return other


def batch():
    """Two prompts, left-padded; completions of four, two and one token, right-padded, and a token of an environment."""
    generator = torch.Generator().manual_seed(3)
    # Ids 2 to 13 are digits and signs: no padding, no end token.
    prompt_ids_BP = torch.randint(2, 14, (3, 3), generator=generator)
    ids_BT = torch.randint(2, 14, (3, 4), generator=generator)
    prompt_mask_BP = torch.tensor([[True, True, True], [False, True, True], [False, True, True]])
    real_BT = torch.arange(4)[None] < torch.tensor([4, 2, 1])[:, None]
    mask_BT = real_BT.clone()
    mask_BT[0, 1] = False
    prompts = {"prompt_ids_BP": prompt_ids_BP, "prompt_mask_BP": prompt_mask_BP}
    return {**prompts, "ids_BT": ids_BT, "real_BT": real_BT, "mask_BT": mask_BT}


def gradient(policy, reference, term):
    """The gradient of the term's surrogate in the policy's parameters, flat, as training computes it."""
    inputs = batch()
    passed = reference.forward_pass(**inputs)
    wanted = {"certainty": term.weight == "policy"}
    if term.top is not None:
        wanted["top"] = [term.top]
    scored = token_pass(policy.model, **inputs, **OPTIONS, reference=passed, **wanted)
    top_columns = None
    if term.top is not None:
        top_columns = scored.top[term.top]
    mask_BT = inputs["mask_BT"]
    surrogate_BT = kl_surrogate(
        term,
        logp_BT=scored.logp_BT,
        ref_logp_BT=passed.logp_BT,
        behaviour_logp_BT=torch.where(mask_BT, -2.0, 0.0),
        mask_BT=mask_BT,
        top=top_columns,
        certainty_BT=scored.certainty_BT,
    )
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(surrogate_BT.sum(), parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def served(server, policy, k=3, **settings):
    return TeacherServer(TeacherConfig(url=server.url, **settings), policy, k)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.label())
def test_the_gradients_are_those_of_the_teacher_in_this_process(policy, teacher, serve, term):
    local = Reference(teacher.model, PassOptions(**OPTIONS))
    remote = served(serve(teacher), policy)
    expected = gradient(policy, local, term)
    assert float(expected.norm()) > 1e-3, "a gradient of 0 would agree with anything that is lost on the way"
    torch.testing.assert_close(gradient(policy, remote, term), expected, atol=1e-5, rtol=1e-4)


def test_only_the_likeliest_tokens_are_known(policy, teacher, serve):
    passed = served(serve(teacher), policy).forward_pass(**batch())
    whole = Reference(teacher.model, PassOptions(**OPTIONS)).forward_pass(**batch())
    torch.testing.assert_close(passed.logp_BT, whole.logp_BT, atol=1e-5, rtol=1e-5)
    # Six tokens of the policy in the three completions, three likeliest each: their ids and their log-probs.
    assert [tuple(column.shape) for column in passed.top] == [(6, 3), (6, 3)]
    assert passed.hidden_NH is None


@pytest.mark.parametrize(
    ("quantity", "message"),
    [
        ({"kl": True}, "not of the vocabulary"),
        ({"top": [TopRequest(4, "reference")]}, "only its 3 likeliest"),
        ({"top": [TopRequest(3, "policy")]}, "only its 3 likeliest"),
    ],
    ids=["exact KL", "a fourth token", "the policy's tokens"],
)
def test_a_quantity_that_needs_more_than_the_likeliest_tokens_is_refused(policy, teacher, serve, quantity, message):
    passed = served(serve(teacher), policy).forward_pass(**batch())
    with pytest.raises(ValueError, match=message):
        token_pass(policy.model, **batch(), **OPTIONS, reference=passed, **quantity)


def test_the_server_may_fail_twice(policy, teacher, serve):
    server = serve(teacher)
    remote = served(server, policy)
    expected = remote.forward_pass(**batch()).logp_BT
    server.faults[:] = ["500", "drop"]
    assert torch.equal(remote.forward_pass(**batch()).logp_BT, expected)


def test_a_server_that_keeps_failing_ends_the_run(policy, teacher, serve):
    server = serve(teacher)
    remote = served(server, policy)
    server.faults[:] = ["500"] * 9
    with pytest.raises(RunFailed, match=r"^reference\.teacher\.url: http.*answered 500"):
        remote.forward_pass(**batch())


def test_the_teachers_hash_names_the_server_and_its_model(policy, teacher, serve):
    server = serve(teacher)
    teacher_hash = served(server, policy).hash
    assert served(server, policy).hash == teacher_hash
    assert served(server, policy, server_model="a").hash != teacher_hash


def test_a_teacher_that_refuses_the_key_is_named_with_the_variable(policy, teacher, serve, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "wrong")
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*environment variable OTHER_KEY"):
        served(serve(teacher), policy, api_key_env="OTHER_KEY")


def test_a_server_that_cannot_be_the_teacher_is_refused(policy, teacher, serve):
    server = serve(teacher)
    server.answers["/v1/models"] = (404, {})
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*404"):
        served(server, policy)


def test_an_address_where_nothing_listens_is_refused(policy, short_polls):
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*ConnectError"):
        TeacherServer(TeacherConfig(url="http://127.0.0.1:1"), policy, 0)


def test_a_token_that_is_none_of_the_policys_ends_the_run(policy, serve):
    wide = llama(tied=True)
    wide.resize_token_embeddings(wide.config.vocab_size + 8, mean_resizing=False)
    with torch.no_grad():
        # Fifty times a known token's logits: the foreign tokens are among the likeliest.
        wide.get_input_embeddings().weight[-8:] = 50.0 * wide.get_input_embeddings().weight[:8]
    with pytest.raises(RunFailed, match="none of the policy's"):
        served(serve(loaded(wide)), policy).forward_pass(**batch())


@pytest.mark.parametrize("url", ["ftp://host", "http://user:key@host", "host:8000", "http://host:99999"])
def test_addresses_are_checked(url):
    with pytest.raises(UserError, match=r"^reference\.teacher\.url: .*without user or key"):
        TeacherConfig(url=url)
