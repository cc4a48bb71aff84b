"""Other systems' released KL code, run as it is through the exact oracle.

wheels (requirements.txt, fetch.py) -> loading (imports, stand-ins) -> adapters (Case: a Loss over Rows)
    -> measure (the oracle) and equivalence (our terms, same derivatives) -> report (one table)
"""
