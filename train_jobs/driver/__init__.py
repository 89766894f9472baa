"""What steers a job: its submission, its lease, its groups, its failures, its end."""
