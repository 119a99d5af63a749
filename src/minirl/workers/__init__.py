"""The workers that hold the models: plain classes whose methods take and give a DataProto."""
