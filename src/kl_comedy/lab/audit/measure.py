"""Completions in equal blocks of whole groups.

The policy to audit and its completions: trained a little in this process, or taken from a run's folder.

A policy that has not left its reference has no KL gradient, so a config alone is trained for some updates first, as
the run would, with no tracking. Where the config trains on stale samples the completions are drawn by the policy as
it was that many updates before, which is what the run's own updates see.

Which terms are audited: the config's own, a panel of well-known cells, and recipes by name.

Whether beta changes the gradient at all, through the training step's own preparation and loss.

A term can be written down, logged and without effect: a mask that is never open, a clamp that is always shut, a cost
that the baseline takes away again. The whole gradient is taken at 0 and at twice the term's beta.

From blocks of completions to findings: gradients of every channel, their products, and what those say.

Legend: ``C`` channels, ``K`` blocks. A gram is ``[C, C, K, K]``: ``gram[a, b, j, k]`` is the inner product of channel
a on block j with channel b on block k, in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from kl_comedy.config import Config, load_config
from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import BetaState, KLTerm
from kl_comedy.lab.audit.gradients import BlockGradients, Channel, Layout, block_gradients, layer_groups, reference_term
from kl_comedy.lab.audit.report import SIGNIFICANT, AuditReport, BetaCheck, LayerFinding, TermFinding
from kl_comedy.lab.audit.statistics import (
    MINIMUM_BLOCKS,
    Estimate,
    cosine,
    delivered,
    difference_gram,
    estimate,
    mean_product,
    noise,
    p_of_zero_mean,
    rooted,
    squared_bias,
)
from kl_comedy.records import Scored
from kl_comedy.registry import RECIPES
from kl_comedy.rollouts import sampling_from
from kl_comedy.training.build import is_off_policy
from kl_comedy.training.experience import derive_seed
from kl_comedy.training.experience_module import ExperienceModule
from kl_comedy.training.loss import micro_loss
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.prepare import prepare
from kl_comedy.training.run_folder import RunDir


def equal_blocks(rows: Sequence[Scored], blocks: int) -> list[list[Scored]]:
    """At most ``blocks`` blocks of as many whole groups each; groups that are left over are left out.

    Rows of a group stand together. Blocks must be equal, for their gradients are means over completions.
    """
    groups: list[list[Scored]] = []
    for row in rows:
        if not groups or groups[-1][0].rollout.group_id != row.rollout.group_id:
            groups.append([])
        groups[-1].append(row)
    count = min(blocks, len(groups))
    size = len(groups) // count
    return [[row for group in groups[n * size : (n + 1) * size] for row in group] for n in range(count)]


log = logging.getLogger("kl_comedy")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A policy at some version of its weights, and rows drawn ``lag`` updates before."""

    module: PolicyModule
    trainer: lightning.Trainer
    rows: list[Scored]
    lag: int


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What CONFIG names: a config, and the newest checkpoint where it is the folder of a run."""

    config: Config
    checkpoint: Path | None
    step: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> Origin:
        """Read a YAML config or a run's folder. Raises :class:`UserError` for a folder without a checkpoint."""
        if not path.is_dir():
            return cls(config=load_config(path, overrides), checkpoint=None, step=0)
        run = RunDir(path=path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is a folder without config.yaml; give a YAML config, or the folder of a run")
        if run.checkpoint is None or run.checkpoint_step is None:
            raise UserError(
                f"{path} holds no checkpoint (train.checkpoint_every, train.keep_checkpoints); audit its config.yaml "
                "instead, which trains some updates first"
            )
        if any(text.startswith(("kl=", "kl.", "model.")) for text in overrides):
            raise UserError(
                "audit: kl and model of a run are what its checkpoint was trained with; audit other terms with --terms"
            )
        config = load_config(path / "config.yaml", overrides)
        return cls(config=config, checkpoint=run.checkpoint, step=run.checkpoint_step)


def staleness(config: Config) -> int:
    """How many updates old the samples of the stalest update of a batch are; 0 on-policy."""
    if not is_off_policy(config):
        return 0
    return (
        config.lag.steps
        + config.lag.max_steps
        + config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch
        - 1
    )


@contextlib.contextmanager
def subject(origin: Origin, *, updates: int, samples: int, tell: Callable[[str, int, int], None]) -> Iterator[Subject]:
    """Build the run, bring its policy to where it is audited, and draw ``samples`` completions (whole groups).

    From a config: ``updates`` updates from the start. From a checkpoint: at it, or, where samples are stale, as many
    updates further. ``tell(stage, done, total)`` is called as it goes.
    """
    config, lag = origin.config, staleness(origin.config)
    if origin.checkpoint is None and updates <= lag:
        raise UserError(
            f"--updates: got {updates}; this config trains on samples {lag} updates old, so at least {lag + 1}"
        )
    stop = origin.step + lag if origin.checkpoint is not None else updates
    steps = max(config.train.steps, stop)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    from kl_comedy.training.run import make_trainer

    module, data = PolicyModule(config), ExperienceModule(config)
    try:
        walk = _Walk(samples=samples, draw_at=stop - lag, stop_at=stop, tell=tell)
        trainer = make_trainer(config, [walk])
        trainer.fit(module, datamodule=data, ckpt_path=origin.checkpoint, weights_only=True)
        if module.version != stop or not walk.rows:
            raise UserError(f"audit: training stopped at update {module.version}, before update {stop}")
        yield Subject(module=module, trainer=trainer, rows=walk.rows, lag=lag)
    finally:
        data.close()


class _Walk(Callback):
    """Stops training at a version, and draws the audited completions at another."""

    def __init__(self, *, samples: int, draw_at: int, stop_at: int, tell: Callable[[str, int, int], None]) -> None:
        self._samples, self._tell = samples, tell
        self._draw_at, self._stop_at = draw_at, stop_at
        self.rows: list[Scored] = []

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # The checkpoint of a run's last update says that its batch was the last; this stream goes on.
        checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._at(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._at(trainer, pl_module)

    def _at(self, trainer: Any, module: PolicyModule) -> None:
        if self._draw_at > 0 or self._stop_at > module.version:
            self._tell("training", module.version, self._stop_at)
        if module.version == self._draw_at and not self.rows:
            with trainer.precision_plugin.forward_context():
                self.rows = self._draw(trainer.datamodule)
        if module.version >= self._stop_at:
            trainer.should_stop = True

    def _draw(self, data: ExperienceModule) -> list[Scored]:
        """Fresh completions, a batch of the run's size at a time, of prompts in an order of their own."""
        config = data.config
        rollout = config.rollout
        prompts = -(-self._samples // rollout.group_size)
        batch = min(rollout.prompts_per_batch, prompts)
        order = PromptOrder(len(data.prompts.train), batch, derive_seed(config.seed, "audit", 0))
        found: list[Scored] = []
        for n in range(-(-prompts // batch)):
            asked = [data.prompts.train[i] for i in order.indices(n)][: prompts - n * batch]
            rollouts = data.backend.generate(
                asked,
                group_size=rollout.group_size,
                sampling=sampling_from(rollout),
                seed=derive_seed(config.seed, "audit", n + 1),
            )
            found += data.scorer.score([_numbered(r, n * batch) for r in rollouts])
            self._tell("sampling", len(found), prompts * rollout.group_size)
        return found


def _numbered(rollout: Any, first: int) -> Any:
    """Group numbers count on from batch to batch."""
    return dataclasses.replace(rollout, group_id=rollout.group_id + first)


PANEL_BETA = 0.05
"""The coefficient at which a panel term is weighed against the policy loss where the config has no term of its own."""

PANEL = (
    KLTerm("k1", placement="reward", credit="total"),
    KLTerm("k1", placement="reward"),
    KLTerm("k1", placement="reward", correction="prefix"),
    KLTerm("k1", placement="loss"),
    KLTerm("k2", placement="loss"),
    KLTerm("k3", placement="loss"),
    KLTerm("k3", placement="reward"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("exact", placement="loss"),
    KLTerm("exact", placement="reward"),
    KLTerm("exact", placement="loss", correction="prefix_previous"),
)
"""The paper's cells, the corrected ones, and the Rao-Blackwellized ones."""


@dataclass(frozen=True, kw_only=True)
class Audited:
    """A term under audit. ``key`` names it in metrics: a config term by position, others by recipe or label.

    ``beta`` is the coefficient in force; ``position`` is that among the config's terms, None for others.
    """

    key: str
    label: str
    term: KLTerm
    beta: float
    position: int | None


def select(
    names: Sequence[str], terms: Sequence[KLTerm], betas: Sequence[float], *, on_policy: bool, key: str
) -> list[Audited]:
    """The terms that ``names`` ask for: ``own``, ``panel``, or recipes. A shape asked for twice is audited once.

    On-policy the panel leaves out ratios, which are one there. Raises :class:`UserError` under ``key`` for another
    name.
    """
    allowed = ["own", "panel", *RECIPES.names()]
    found: list[Audited] = []
    for name in names:
        if name not in allowed:
            raise bad_value(key, name, allowed)
        if name == "own":
            own = zip(terms, betas, strict=True)
            found += [
                Audited(key=f"kl_{n}", label=f"kl.{n}: {term.label()}", term=term, beta=beta, position=n)
                for n, (term, beta) in enumerate(own)
            ]
        elif name == "panel":
            beta = betas[0] if betas else PANEL_BETA
            shown = [term for term in PANEL if not (on_policy and term.correction != "none")]
            found += [
                Audited(key=_plain(term.label()), label=term.label(), term=term, beta=beta, position=None)
                for term in shown
            ]
        else:
            of_recipe = RECIPES.get(name).fn()
            for n, term in enumerate(of_recipe):
                label = name if len(of_recipe) == 1 else f"{name} {n}"
                beta = BetaState(term.beta).value
                found.append(
                    Audited(key=_plain(label), label=f"{label}: {term.label()}", term=term, beta=beta, position=None)
                )
    return _once(sorted(found, key=lambda item: item.position is None))


def _once(found: Sequence[Audited]) -> list[Audited]:
    """Every term of the config, and each further shape (a term whatever its beta) that is not there yet."""
    kept: list[Audited] = []
    shapes: list[KLTerm] = []
    for item in found:
        shape = dataclasses.replace(item.term, beta=1.0)
        if item.position is not None or shape not in shapes:
            kept.append(item)
            shapes.append(shape)
    return kept


def _plain(label: str) -> str:
    """A label as part of a metric's name."""
    return "".join(c if c.isalnum() or c in "_-." else "_" for c in label)


ROUNDING = 1e-6
"""A change of the gradient by less than this share of it is rounding, in float32."""

DISAGREEMENT = 0.05
"""Relative distance beyond which the difference quotient is not the term's gradient. In float32 it is near 1e-5 where
the KL part is as large as the policy's, and grows as that share shrinks; bfloat16 takes most of the rest."""


def training_gradient(
    module: PolicyModule, rows: Sequence[Scored], betas: Sequence[float], layout: Layout
) -> list[Tensor]:
    """The gradient that the training step would give the optimizer for ``rows``, sketched per layer group."""
    micros = prepare(
        rows,
        module.plan,
        betas=betas,
        references=module.references,
        policy_pass=module.policy_pass,
        old_policy=module.record(rows),
    )
    total: list[Tensor] = []
    for micro in micros:
        loss = micro_loss(
            micro, module.passes(micro), terms=module.terms, betas=betas, algorithm=module.config.algorithm
        ).loss
        found = layout.fold(torch.autograd.grad(loss, layout.parameters, allow_unused=True))
        total = [t + f for t, f in zip(total, found, strict=True)] if total else found
    return total


def check_beta(
    module: PolicyModule,
    rows: Sequence[Scored],
    finding: TermFinding,
    item: Audited,
    block: BlockGradients,
    names: Sequence[str],
    layout: Layout,
) -> TermFinding:
    """``finding`` with the check of its beta. ``block`` holds the term's own gradient on the same ``rows``."""
    betas = [beta.value for beta in module.betas]
    assert item.position is not None
    high = 2.0 * item.beta or 1.0
    at: list[Tensor] = []
    for value in (0.0, high):
        changed = [value if n == item.position else beta for n, beta in enumerate(betas)]
        at.append(torch.cat(training_gradient(module, rows, changed, layout)).double())
    change = at[1] - at[0]
    scale = float(at[0].norm() + at[1].norm())
    own = torch.cat([vectors[names.index(item.key)] for vectors in block.vectors]).double() * block.weight
    share = float(change.norm()) / scale if scale > 0 else 0.0
    inert = share <= ROUNDING
    size = float(own.norm())
    disagreement = float((change / high - own).norm()) / size if size > 0 else math.nan
    linear = item.term.baseline != "before"
    check = BetaCheck(
        change=share,
        disagreement=disagreement,
        inert=inert,
        wrong=not inert and linear and not disagreement <= DISAGREEMENT + ROUNDING * scale / max(high * size, 1e-300),
    )
    return dataclasses.replace(finding, check=check)


POLICY = "policy"
_NOWHERE = Estimate(value=math.nan, low=math.nan, high=math.nan)


def audit_blocks(
    module: PolicyModule,
    blocks: Sequence[Sequence[Scored]],
    audited: Sequence[Audited],
    *,
    on_policy: bool,
    sketch: int,
    seed: int,
    check: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> AuditReport:
    """Audit ``audited`` on blocks of whole groups, each of as many completions.

    ``check`` adds the check of beta for the terms of the config, on the first block. ``progress`` is called after
    each block. Leaves weights, ``.grad`` and random state alone.

    Where noise hides the reference gradient nothing is compared with it, and ``reference_noise`` is NaN. Raises
    :class:`UserError` for too few blocks, or a policy that is its reference still.
    """
    if len(blocks) < MINIMUM_BLOCKS:
        raise UserError(f"audit: intervals need at least {MINIMUM_BLOCKS} blocks of whole groups, got {len(blocks)}")
    started = time.perf_counter()
    group_size = sum(row.rollout.group_id == blocks[0][0].rollout.group_id for row in blocks[0])
    channels = _channels(audited, on_policy=on_policy, group_size=group_size)
    layout, metrics = Layout.of(layer_groups(module.policy), sketch), MetricAccumulator()
    found: list[BlockGradients] = []
    for rows in blocks:
        found.append(block_gradients(module, rows, channels, layout, metrics))
        progress()
    values = metrics.values()
    if values["exact_kl_token"] == 0.0:
        raise UserError(
            "audit: the policy is its initial reference still, so every KL gradient is zero; train it first "
            "(more --updates, or audit the folder of a run)"
        )
    names = [channel.name for channel in channels]
    grams = {group.name: _gram([block.vectors[n] for block in found]) for n, group in enumerate(layout.groups)}
    update = module.config.rollout.prompts_per_batch * group_size // module.config.algorithm.updates_per_batch
    findings = _Findings(names=names, grams=grams, values=values, seed=seed, scale=len(blocks[0]) / update)
    terms = [findings.of(item) for item in audited]
    if check:
        terms = [
            check_beta(module, blocks[0], term, item, found[0], names, layout) if item.position is not None else term
            for term, item in zip(terms, audited, strict=True)
        ]
    main = reference_term("initial", on_policy=on_policy, group_size=group_size)
    return AuditReport(
        name=module.config.name,
        version=module.version,
        regime="on_policy" if on_policy else "off_policy",
        completions=sum(len(rows) for rows in blocks),
        blocks=len(blocks),
        length=values["length"],
        exact_kl_token=values["exact_kl_token"],
        exact_kl_sequence=values["exact_kl_sequence"],
        reference_term=main.label(),
        reference_noise=findings.reference_noise(_reference_name(main)),
        policy_silent_share=values[f"silent/{POLICY}"],
        clip_share=values.get("clipped"),
        total_kl_to_policy=findings.kl_to_policy([(i.key, i.beta) for i in audited if i.position is not None]),
        sketch=sketch,
        seconds=time.perf_counter() - started,
        terms=terms,
    )


def _reference_name(term: KLTerm) -> str:
    return f"reference/{term.reference}"


def _channels(audited: Sequence[Audited], *, on_policy: bool, group_size: int) -> list[Channel]:
    """The policy loss, a reference gradient per reference policy, the audited terms."""
    kept = sorted({"initial", *(item.term.reference for item in audited)} - {"sampler"})
    references = [reference_term(name, on_policy=on_policy, group_size=group_size) for name in kept]
    return [
        Channel(name=POLICY, term=None),
        *(Channel(name=_reference_name(term), term=term) for term in references),
        *(Channel(name=item.key, term=item.term, beta=item.beta or 1.0) for item in audited),
    ]


def _gram(blocks: Sequence[Tensor]) -> Tensor:
    """``K`` tensors ``[C, w]`` to ``[C, C, K, K]``."""
    stacked = torch.stack(list(blocks)).double().cpu()
    k, c, _ = stacked.shape
    flat = stacked.transpose(0, 1).reshape(c * k, -1)
    return (flat @ flat.T).reshape(c, k, c, k).permute(0, 2, 1, 3)


class _Findings:
    """Reads estimates off the products. ``scale`` is the size of a block over that of the run's updates."""

    def __init__(
        self, *, names: Sequence[str], grams: Mapping[str, Tensor], values: Mapping[str, float], seed: int, scale: float
    ) -> None:
        self._at = {name: n for n, name in enumerate(names)}
        self._layers = grams
        self._whole = torch.stack(list(grams.values())).sum(0)
        self._values = values
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def _products(self, gram: Tensor, term: str, reference: str) -> tuple[Tensor, Tensor, Tensor]:
        own, ref = self._at[term], self._at[reference]
        return gram[own, own], gram[own, ref], gram[ref, ref]

    def reference_noise(self, name: str) -> float:
        """Standard error of a reference gradient over its norm; NaN where the gradient is not to be told from it."""
        at = self._at[name]
        gram = self._whole[at, at]
        square, spread = float(mean_product(gram)), float(noise(gram)) / len(gram)
        return math.sqrt(max(spread, 0.0) / square) if square > max(spread, 0.0) else math.nan

    def kl_to_policy(self, parts: Sequence[tuple[str, float]]) -> float:
        """Norm of ``sum beta g`` over that of the policy gradient, each of an update's size; NaN without either."""
        k = self._whole.shape[-1]
        total = torch.zeros(k, k, dtype=torch.float64)
        for one, beta in parts:
            for other, gamma in parts:
                total += beta * gamma * self._whole[self._at[one], self._at[other]]
        kl, policy = self._of_an_update(total), self._of_an_update(self._whole[self._at[POLICY], self._at[POLICY]])
        return math.sqrt(kl / policy) if kl >= 0 and policy > 0 else math.nan

    def _of_an_update(self, gram: Tensor) -> float:
        """Mean square norm of the gradient of a batch of the run's size."""
        return float(mean_product(gram) + noise(gram) * self._scale)

    def of(self, item: Audited) -> TermFinding:
        """Everything about one term but the check of beta."""
        own = self._at[item.key]
        products = None
        if item.term.reference != "sampler" and math.isfinite(self.reference_noise(_reference_name(item.term))):
            products = self._products(self._whole, item.key, _reference_name(item.term))
        own_KK = self._whole[own, own]
        p_no_mean = p_of_zero_mean(own_KK, self._generator)
        share = {name: self._values.get(f"{name}/{item.key}") for name in ("silent", "clamped", "capped")}
        return TermFinding(
            key=item.key,
            label=item.label,
            position=item.position,
            beta=item.beta,
            p_no_mean=p_no_mean,
            **self._against(products, p_no_mean),
            kl_to_policy=self.kl_to_policy([(item.key, item.beta)]),
            silent_share=share["silent"] or 0.0,
            clamped_share=share["clamped"],
            capped_share=share["capped"],
            layers={} if products is None else {name: self._layer(name, item) for name in self._layers},
        )

    def _against(self, products: tuple[Tensor, Tensor, Tensor] | None, p_no_mean: float) -> dict[str, Any]:
        if products is None:
            return {
                "delivered": _NOWHERE,
                "cosine": None,
                "bias": _NOWHERE,
                "p_unbiased": math.nan,
                "variance": math.nan,
            }
        own_KK, with_KK, ref_KK = products
        difference_KK = difference_gram(own_KK, with_KK, ref_KK)
        same = float(difference_KK.diagonal().sum()) <= 1e-10 * float(ref_KK.diagonal().sum())
        direction = estimate(cosine, own_KK, with_KK, ref_KK)
        found = p_no_mean < SIGNIFICANT and math.isfinite(direction.value) and math.isfinite(direction.half_width)
        return {
            "delivered": estimate(delivered, with_KK, ref_KK),
            "cosine": direction if found else None,
            "bias": rooted(estimate(squared_bias, difference_KK, ref_KK)),
            "p_unbiased": 1.0 if same else p_of_zero_mean(difference_KK, self._generator),
            "variance": float(noise(own_KK) / noise(ref_KK)),
        }

    def _layer(self, name: str, item: Audited) -> LayerFinding:
        own_KK, with_KK, ref_KK = self._products(self._layers[name], item.key, _reference_name(item.term))
        square = float(mean_product(ref_KK))
        if square <= 0:
            return LayerFinding(cosine=math.nan, delivered=math.nan, bias=math.nan)
        bias = float(squared_bias(difference_gram(own_KK, with_KK, ref_KK), ref_KK))
        return LayerFinding(
            cosine=float(cosine(own_KK, with_KK, ref_KK)),
            delivered=float(delivered(with_KK, ref_KK)),
            bias=math.sqrt(max(bias, 0.0)),
        )
