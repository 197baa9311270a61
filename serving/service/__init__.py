"""What one worker serves: its engines, its models, and the check of rows."""
