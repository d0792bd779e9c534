"""Mixed-integer linear programs, written with cvxpy and solved by SCIP or HiGHS.

Importing this package imports neither cvxpy nor a solver: ``minimize`` imports the chosen solver alone.
"""

from __future__ import annotations

# name of a solver -> the package that it needs
PACKAGES = {"scip": "pyscipopt", "highs": "highspy"}
