"""The studies with the oracle: `python -m research.studies COMMAND` writes data, figures and a page below results/."""
