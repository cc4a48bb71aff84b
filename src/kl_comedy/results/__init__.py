"""Results: runs, from an MLflow store or an export, as tables, comparisons, plots and reports, and their check.

    Runs -> selection -> statistics -> tables, plots, pages

pandas, mlflow and matplotlib are imported by the functions that use them.
"""
