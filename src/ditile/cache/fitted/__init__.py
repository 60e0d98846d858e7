"""Fitted schedules: the computed steps for each budget and forecasts of the other steps, fitted to a few full runs."""
