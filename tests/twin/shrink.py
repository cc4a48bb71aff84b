"""A failing config made small: every key that the failure does not need is at its default again."""

import copy

import yaml
from tests.twin.base import base_config
from tests.twin.compare import compare
from tests.twin.draw import refusal


def fails(mapping, kill_at):
    """The difference of a config that trains; None where it agrees or is refused."""
    if refusal(mapping) is not None:
        return None
    return compare(mapping, kill_at=kill_at)


def smaller(mapping):
    """The same config without one of its KL terms, or with one of its keys as the smallest config has it."""
    base = base_config()
    for position in range(len(mapping.get("kl", []))):
        fewer = copy.deepcopy(mapping)
        del fewer["kl"][position]
        yield fewer
        for key in list(mapping["kl"][position]):
            if key in ("estimator", "placement"):
                continue
            plainer = copy.deepcopy(mapping)
            del plainer["kl"][position][key]
            yield plainer
    for section, settings in mapping.items():
        if section == "kl" or settings == base.get(section):
            continue
        reset = copy.deepcopy(mapping)
        if section in base:
            reset[section] = base[section]
        else:
            del reset[section]
        yield reset
        if not isinstance(settings, dict):
            continue
        for key, value in settings.items():
            default = base.get(section, {}).get(key)
            if value == default:
                continue
            reset = copy.deepcopy(mapping)
            if default is None:
                del reset[section][key]
            else:
                reset[section][key] = default
            yield reset


def shrunk(mapping, kill_at, limit=60):
    """A config that fails as well, in at most ``limit`` further runs, and whether it needs the interruption."""
    runs = 0
    if kill_at is not None and fails(mapping, None):
        kill_at = None
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(mapping):
            if runs == limit:
                return mapping, kill_at
            runs += 1
            if fails(candidate, kill_at):
                mapping = candidate
                is_smaller = True
                break
    return mapping, kill_at


def without_defaults(mapping):
    """What a config has beside the smallest one."""
    base = base_config()
    rest = {}
    for section, settings in mapping.items():
        if isinstance(settings, dict):
            settings = {key: value for key, value in settings.items() if value != base.get(section, {}).get(key)}
        if settings and settings != base.get(section):
            rest[section] = settings
    return rest


def report(mapping, kill_at, difference):
    """What a failure prints: the first quantity that differs, and the smallest config found that shows it."""
    small, small_kill_at = shrunk(mapping, kill_at)
    again = fails(small, small_kill_at) or difference
    lines = [f"the engine and its slow twin differ in {again}"]
    if small_kill_at is not None:
        lines.append(f"interrupted before update {small_kill_at}, then resumed")
    lines += ["beside tests/twin/base.py:", yaml.safe_dump(without_defaults(small), default_flow_style=None, width=100)]
    return "\n".join(lines)
