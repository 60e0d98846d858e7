"""Fitted schedules: the steps that compute for each budget, and forecasts of the others, fitted to a few full runs."""
