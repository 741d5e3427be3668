"""KL estimators and controllers of the KL coefficient."""
