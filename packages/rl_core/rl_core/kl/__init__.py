"""KL estimators and KL coefficient controllers."""
