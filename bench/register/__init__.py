"""The register of KL code: what the released implementations of other systems and papers optimize.

rows.yaml -> sources.py (the released functions) -> measure.py (exact gradients) -> register.json -> page.py (pages)
"""
