"""What the gradient of each KL term is on a real model: against a reference gradient, and whether beta matters at all.

    rows in K blocks -> gradient of every loss, by layer group, sketched -> inner products of blocks -> report

The command audits fresh completions of a policy that has left its reference; the callback audits an update's own rows
during a run.
"""
