"""What the gradient of each KL term is on a real model: against a reference gradient, and whether beta matters at all.

    rows in K blocks -> gradient of every channel, by layer group, sketched -> products of blocks -> estimates -> report

A channel is the policy loss, a reference gradient, or an audited term at beta = 1. The command audits fresh
completions of a policy that has left its reference; the callback audits an update's own rows while a run goes on.
"""
