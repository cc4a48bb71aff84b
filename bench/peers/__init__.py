"""The released KL code of other systems, unmodified, measured by the exact oracle.

wheels (requirements.txt, fetch.py) -> loading (imports, stubs) -> adapters (Case: a Loss over Rows)
    -> measure (exact gradients) and equivalence (same derivatives as kl_comedy's terms) -> report (tables)
"""
