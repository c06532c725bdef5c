// Puts what the server answers into the page's figures, tiles and table, every two seconds; nothing is reloaded.
const every = 2000, most = 40;
const headers = window.ndpKey ? {Authorization: 'Bearer ' + window.ndpKey} : {};
const named = name => Bokeh.documents.map(d => d.get_model_by_name(name)).find(model => model !== null);
const sources = name => Bokeh.documents.map(d => d.get_model_by_name(name)).filter(model => model !== null);
const number = (value, digits) => value === null || value === undefined ? '–' : value.toLocaleString('en', {maximumFractionDigits: digits});
const bytes = value => value < 1 << 30 ? number(value / (1 << 20), 1) + ' MiB' : number(value / (1 << 30), 1) + ' GiB';

function element(tag, text, kind) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function tile(value, what, kind) {
  const made = element('div', '', 'tile' + (kind ? ' ' + kind : ''));
  made.append(element('b', value), what);
  return made;
}

function summed(workers, name) { return workers.reduce((sum, worker) => sum + worker.totals[name], 0); }

function show_status(status) {
  const first = status.workers[0], workers = status.workers;
  document.getElementById('model').textContent = status.model;
  const e = first.effective;
  document.getElementById('about').textContent =
    `${e.hot_experts} of ${e.experts} experts hot in each layer${e.warm_experts ? `, ${e.warm_experts} warm` : ''}; ${e.cold_precision} cold ones; simulated hardware ${e.hardware}, ` +
    `${e.pe_mode}; epoch ${first.plan.epoch}; as of ${new Date().toLocaleTimeString('en-GB')}`;
  const pairs = ['hot', 'spilled', 'cold', 'fallback', 'warm'].map(kind => summed(workers, kind + '_pairs'));
  const all = pairs.reduce((a, b) => a + b, 0), share = value => all ? number(100 * value / all, 1) + ' %' : '–';
  const down = workers.filter(worker => worker.device.state !== 'up');
  const memory = kind => workers.reduce((sum, worker) => sum + worker.memory.engine[kind] + worker.memory.device[kind], 0);
  const newest = status.finished.find(report => report.measured_tpot_ms) || {};
  document.getElementById('tiles').replaceChildren(
    tile(down.length ? 'down' : 'up', down.length ? down[0].device.reason : 'device, replicas of ' + bytes(first.device.resident_bytes), down.length ? 'down' : 'up'),
    tile(share(pairs[0]), 'of decode pairs hot'),
    tile(share(pairs[1] + pairs[2]), 'on the device'),
    tile(share(pairs[3]), 'fallback: by the host, as the device gave no answer', pairs[3] ? 'lost' : ''),
    tile(bytes(memory('held')), 'held by engine and device'),
    tile(bytes(memory('mapped')), 'mapped from files, in the page cache'),
    ...(e.warm_experts ? [tile(share(pairs[4]), "on the host's CPU")] : []),
    tile(number(first.plan.avg_bits, 2), 'bits per cold expert'),
    tile(number(summed(workers, 'migrated_experts'), 0), 'experts moved'),
    tile(number(status.running.length, 0), 'requests running'),
    tile(number(newest.measured_tpot_ms, 2) + ' ms', 'measured per token'),
    tile(number(newest.simulated_tpot_us, 2) + ' us', 'simulated per token'));
  show_requests(status.finished);
}

function show_requests(finished) {
  const last = finished.slice(0, most).reverse();
  const of = (key) => last.map(report => report[key] ?? 0);
  for (const source of sources('requests')) {
    source.data = {
      at: last.map((_, index) => index), id: last.map(report => report.id),
      measured_ttft: of('measured_ttft_ms'), measured_tpot: of('measured_tpot_ms'),
      simulated_ttft: of('simulated_ttft_us'), simulated_tpot: of('simulated_tpot_us'),
    };
  }
  const columns = [
    ['request', report => report.id], ['ended', report => report.finish],
    ['prompt', report => report.prompt_tokens], ['tokens', report => report.output_tokens],
    ['hot', report => report.hot_pairs], ['device', report => report.cold_pairs + report.spilled_pairs],
    ['fallback', report => report.fallback_pairs], ['bits', report => number(report.avg_bits, 2)],
    ['measured ms: first', report => number(report.measured_ttft_ms, 1)], ['per token', report => number(report.measured_tpot_ms, 2)],
    ['simulated us: first', report => number(report.simulated_ttft_us, 1)], ['per token', report => number(report.simulated_tpot_us, 2)],
    ['bound by', report => Object.entries(report.simulated_device_bound || {}).sort((a, b) => b[1] - a[1]).map(([name]) => name)[0] || '–'],
  ];
  const line = (tag, cells) => { const made = document.createElement('tr'); made.append(...cells.map(text => element(tag, text))); return made; };
  document.getElementById('head').replaceChildren(line('th', columns.map(([name]) => name)));
  document.getElementById('rows').replaceChildren(
    ...finished.slice(0, 12).map(report => line('td', columns.map(([, value]) => value(report)))));
}

function show_experts(experts) {
  const data = {x: [], y: [], importance: [], bits: [], hot: [], width: []};
  for (const worker of experts.workers) {
    worker.layers.forEach((layer, row) => worker.hot[row].forEach((hot, expert) => {
      data.x.push(expert); data.y.push(layer); data.hot.push(hot ? 2 : 0);
      data.importance.push(worker.importance ? worker.importance[row][expert] : 0);
      const bits = worker.bits ? worker.bits[row][expert] : NaN;
      data.bits.push(bits); data.width.push(bits > 4 ? NaN : bits);
    }));
  }
  const most_important = Math.max(...data.importance, 1e-6);
  for (const mapper of sources('shades')) mapper.high = most_important;
  for (const range of sources('experts-range')) range.end = Math.max(...data.x) + 0.5;
  for (const range of sources('layers-range')) { range.start = Math.max(...data.y) + 0.5; range.end = Math.min(...data.y) - 0.5; }
  for (const source of sources('experts')) source.data = data;
}

async function get(path) {
  const answer = await fetch(location.pathname.replace(/[^/]*$/, '') + path, {headers});
  if (!answer.ok) throw new Error(`${path} answers ${answer.status}`);
  return answer.json();
}

async function look() {
  try {
    const [status, experts] = await Promise.all([get('status'), get('experts')]);
    if (Bokeh.documents.length) { show_status(status); show_experts(experts); document.body.dataset.looks = +(document.body.dataset.looks || 0) + 1; }
  } catch (error) {
    document.getElementById('about').textContent = 'The server does not answer: ' + error.message;
  }
  setTimeout(look, every);
}
look();
