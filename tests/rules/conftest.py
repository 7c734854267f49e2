from hypothesis import settings

# A property is about results; on a busy machine a deadline per example fails by chance.
settings.register_profile("rules", deadline=None)
settings.load_profile("rules")
