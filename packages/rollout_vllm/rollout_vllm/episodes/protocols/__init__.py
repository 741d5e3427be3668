"""The protocols in which agents ask for answers of the policy, each as plain functions between JSON and `Ask`."""
