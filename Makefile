# Short names for the scripts; ARGS="..." is passed on.
.PHONY: demo test bench format lint clean

demo:
	@scripts/demo.sh $(ARGS)

test:
	@scripts/test.sh $(ARGS)

bench:
	@scripts/bench.sh $(ARGS)

format:
	@scripts/format.sh

lint:
	@scripts/lint.sh

clean:
	rm -rf build
