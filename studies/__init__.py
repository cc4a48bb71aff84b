"""The studies with the oracle: `python -m studies COMMAND` writes data, figures and a page below results/."""
